import itertools
from dataclasses import replace

import pytest
import torch
from objective_fixture import FIXTURE, PLAIN, SEQUENCE, SEQUENCES, VECTORS, close, fixture_tokens, flat, loss_of, theta

from fathom.config.families import Advantage, Aggregation, Correction, KlEstimator, Proximal, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.aggregation import AGGREGATIONS, count
from fathom.trainer.objective.objective import LossSums
from fathom.trainer.objective.plan import StepTokens, needs_old_pass, prepare_step
from fathom.trainer.objective.policy_loss import PROXIMALS, bounded_ratio, clipped_policy_loss

CLIPS = ["grpo_clip_0.2", "dapo_clip_higher_0.2_0.28", "dual_clip_0.2_0.28_c3"]
AGGREGATES = {
    Aggregation.TOKEN_MEAN: "token_mean",
    Aggregation.SEQ_MEAN_TOKEN_MEAN: "seq_mean_token_mean_valid_sequences",
    Aggregation.SEQ_MEAN_TOKEN_SUM: "seq_mean_token_sum_valid_sequences",
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: "seq_mean_token_sum_norm_B_times_L",
}


def length_of(aggregation: Aggregation) -> int | None:
    return 8 if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None


def clip_config(name: str, **more: object) -> ObjectiveConfig:
    inputs = VECTORS[name]["inputs"]
    return ObjectiveConfig(
        clip_low=inputs["eps_low"],
        clip_high=inputs["eps_high"],
        dual_clip=inputs.get("c"),
        correction=Correction.NONE,
        **more,  # pyright: ignore
    )


def policy_loss_of(config: ObjectiveConfig, log_ratio: torch.Tensor, advantage: torch.Tensor):
    return clipped_policy_loss(
        log_ratio,
        advantage,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def test_every_family_is_implemented():
    assert set(AGGREGATIONS) == set(Aggregation)
    assert set(PROXIMALS) == set(Proximal)


def test_ppo_ratio():
    expected = VECTORS["ppo_ratio"]["expected"]
    log_ratio = theta().detach() - flat(FIXTURE["logp_old"])
    close(log_ratio, flat(expected["log_ratio"]))
    close(bounded_ratio(log_ratio), flat(expected["ratio"]))


@pytest.mark.parametrize("name", CLIPS)
def test_clipped_token_losses_and_gradients(name):
    expected, config, logp = VECTORS[name]["expected"], clip_config(name), theta()
    made = policy_loss_of(config, logp - flat(FIXTURE["logp_old"]), fixture_tokens(config).advantage)
    close(made.loss.detach(), flat(expected["token_loss"]))
    assert made.clipped.tolist() == flat(expected["clipped"]).bool().tolist()
    made.loss.sum().backward()
    close(logp.grad, flat(expected["dloss_dlogp_token"]))


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("name", CLIPS)
def test_aggregated_clipped_losses(name, aggregation):
    expected = VECTORS[name]["expected"]
    config = clip_config(name, aggregation=aggregation, constant_length=length_of(aggregation))
    terms = loss_of(config, prepare_step(config, fixture_tokens(config)), theta())
    close(terms.loss.detach(), expected["aggregated"][AGGREGATES[aggregation]])
    close(terms.sums.clipped / terms.sums.tokens, expected["clip_fraction_token_mean"])


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize(("name", "proximal"), [("decoupled_ppo", "decoupled"), ("bypass_ppo", "bypass")])
def test_decoupled_and_bypass(name, proximal, aggregation):
    expected = VECTORS[name]["expected"]
    config = ObjectiveConfig(
        proximal=Proximal(proximal),
        correction=Correction.TOKEN_TIS if proximal == "decoupled" else Correction.NONE,
        aggregation=aggregation,
        constant_length=length_of(aggregation),
    )
    logp = theta()
    terms = loss_of(config, prepare_step(config, fixture_tokens(config)), logp)
    close(terms.loss.detach(), expected["aggregated"][AGGREGATES[aggregation]])


def test_weights_have_no_gradient():
    config, logp = ObjectiveConfig(aggregation=Aggregation.TOKEN_MEAN), theta()
    loss_of(config, prepare_step(config, fixture_tokens(config)), logp).loss.backward()
    weights = flat(VECTORS["token_TIS"]["expected"]["weight"])
    close(logp.grad, weights * flat(VECTORS["dapo_clip_higher_0.2_0.28"]["expected"]["dloss_dlogp_token"]) / 9)


def test_dr_grpo():
    expected = VECTORS["dr_grpo"]["expected"]
    config = clip_config(
        "dr_grpo",
        advantage=Advantage.DR_GRPO,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
        constant_length=VECTORS["dr_grpo"]["inputs"]["constant_length_L"],
    )
    tokens = fixture_tokens(config)
    assert tokens.logp_old is not None
    close(policy_loss_of(config, theta() - tokens.logp_old, tokens.advantage).loss, flat(expected["token_loss"]))
    terms = loss_of(config, prepare_step(config, tokens), theta())
    close(terms.loss.detach(), expected["sum_over_B_times_L (B=4)"])


@pytest.mark.parametrize("name", ["aggregation_invariance", "aggregation_invariance_uneven"])
@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN])
def test_micro_batches_of_the_worked_partition(name, aggregation):
    vector = VECTORS[name]
    config = ObjectiveConfig(correction=Correction.NONE, aggregation=aggregation)
    plan, logp, ranks = prepare_step(config, fixture_tokens(config)), theta(), 2
    local = {
        rank: [
            ranks * float(loss_of(config, plan.take(index), logp[index]).loss.detach())
            for sequences in micro_batches
            for index in [torch.isin(SEQUENCE, torch.tensor(sequences)).nonzero().squeeze(1)]
        ]
        for rank, micro_batches in vector["inputs"]["partition"].items()
    }
    short = "token_mean" if aggregation is Aggregation.TOKEN_MEAN else "seq_mean"
    if name == "aggregation_invariance":
        expected = vector["expected"][f"per_rank_microbatch_loss_{aggregation} (dp=2 scaled)"]
        whole = vector["expected"][f"mean_over_ranks_of_sum_over_microbatches_{aggregation}"]
    else:
        expected, whole = vector["expected"][f"{short}_local"], vector["expected"][str(aggregation)]
        local = {rank: [sum(losses[:1]), *losses[1:]] for rank, losses in local.items()}
    for rank, losses in local.items():
        close(losses, expected[rank])
    close(sum(sum(losses) for losses in local.values()) / ranks, whole)


def test_rows_of_one_trajectory_count_once():
    vector = VECTORS["rollout_with_two_training_rows"]
    losses = torch.tensor([v for row in vector["inputs"]["rows_of_same_rollout"]["loss"] for v in row])
    sequence = torch.zeros(len(losses), dtype=torch.int64)
    step = count(sequence, torch.ones(len(losses), dtype=torch.bool), 1)
    coefficients = AGGREGATIONS[Aggregation.SEQ_MEAN_TOKEN_MEAN](step, sequence, None)
    close((coefficients * losses).sum(), vector["expected"]["per_rollout_mean"])


def test_without_an_old_pass_the_first_step_is_the_same():
    config = ObjectiveConfig(correction=Correction.ICEPOP, correction_low=0.5, correction_high=5.0)
    with_pass = fixture_tokens(config, old="logp_theta")
    without = fixture_tokens(config, old=None)
    results = []
    for tokens in (with_pass, without):
        logp = theta()
        terms = loss_of(config, prepare_step(config, tokens), logp)
        terms.loss.backward()
        assert logp.grad is not None
        results.append((terms.sums, logp.grad.tolist(), terms.gate.mask_codes.tolist(), terms.gate.weights.tolist()))
    assert results[0] == results[1]
    assert 0 < results[0][0].tokens < 9, "something is popped, something is trained"


def test_which_configs_need_an_old_pass():
    assert not needs_old_pass(ObjectiveConfig(), 1)
    assert not needs_old_pass(PLAIN, 1)
    assert needs_old_pass(ObjectiveConfig(), 2)
    for config in (
        ObjectiveConfig(correction=Correction.SEQUENCE_TIS),
        ObjectiveConfig(correction=Correction.SEQUENCE_MIS),
        ObjectiveConfig(correction=Correction.GEOMETRIC_RS),
        ObjectiveConfig(veto=1e-4),
        ObjectiveConfig(batch_normalise=True),
        ObjectiveConfig(rejection_denominator=RejectionDenominator.KEPT),
    ):
        assert needs_old_pass(config, 1)
        with pytest.raises(ValueError, match="needs_old_pass"):
            prepare_step(config, fixture_tokens(config, old=None))


def test_what_is_missing_or_misplaced_is_refused():
    with pytest.raises(ValueError, match="logp_ref"):
        prepare_step(ObjectiveConfig(kl_coefficient=0.1), fixture_tokens(PLAIN))
    tokens = fixture_tokens(PLAIN)
    with pytest.raises(ValueError, match="beside 9 tokens"):
        StepTokens(
            sequence=SEQUENCE,
            sequences=SEQUENCES,
            advantage=tokens.advantage[:-1],
            truncated=tokens.truncated,
            logp_behaviour=tokens.logp_behaviour,
        )
    with pytest.raises(ValueError, match=r"outside \[0, 4\)"):
        prepare_step(PLAIN, replace(tokens, sequence=SEQUENCE + 2))


def test_kl_is_weighted_for_tokens_that_another_policy_sampled():
    beta, clip_high = 0.1, 0.28
    plain = ObjectiveConfig(clip_high=clip_high)
    config = ObjectiveConfig(clip_high=clip_high, kl_coefficient=beta, kl_estimator=KlEstimator.K2)
    without = loss_of(plain, prepare_step(plain, fixture_tokens(plain)), theta())
    terms = loss_of(config, prepare_step(config, fixture_tokens(config, ref=True)), theta())
    k2 = flat(VECTORS["kl_penalty_theta_ref"]["expected"]["k2"])
    weights = flat(VECTORS["token_TIS"]["expected"]["weight"])
    rho = flat(VECTORS["ppo_ratio"]["expected"]["ratio"]).clamp(max=1 + clip_high)
    close((terms.loss - without.loss).detach(), beta * (weights * rho * k2).mean())
    close(terms.sums.kl / terms.sums.tokens, VECTORS["kl_penalty_theta_ref"]["expected"]["k2_token_mean"])


def test_masked_truncated_tokens_leave_gradient_and_denominators():
    config = ObjectiveConfig(correction=Correction.NONE, mask_truncated=True)
    tokens, logp = fixture_tokens(config), theta()
    tokens.truncated[SEQUENCE == 1] = True
    plan = prepare_step(config, tokens)
    assert (plan.denominators.tokens, plan.denominators.sequences_with_tokens) == (5, 2)
    assert plan.denominators.sequences == SEQUENCES
    loss_of(config, plan, logp).loss.backward()
    assert logp.grad is not None
    assert logp.grad[SEQUENCE == 1].tolist() == [0] * 4
    assert (logp.grad[SEQUENCE != 1] != 0).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["theta", "old", "ref"])
def test_a_token_without_a_finite_logprob_is_refused_and_counted(bad, where):
    config = ObjectiveConfig(kl_coefficient=0.1, kl_estimator=KlEstimator.K3)
    tokens = fixture_tokens(config, ref=True)
    values = theta().detach().clone()
    {"theta": values, "old": tokens.logp_old, "ref": tokens.logp_ref}[where][4] = bad
    logp = values.requires_grad_()
    terms = loss_of(config, prepare_step(config, tokens), logp)
    terms.loss.backward()
    assert logp.grad is not None
    assert terms.sums.non_finite == 1
    assert terms.sums.tokens == 8
    assert logp.grad[4] == 0
    assert terms.loss.isfinite()
    assert logp.grad.isfinite().all()
    assert logp.grad.count_nonzero() > 4


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("tokens_left", [0, 9])
def test_a_step_without_a_usable_token_has_loss_and_gradient_zero(aggregation, tokens_left):
    config = ObjectiveConfig(
        aggregation=aggregation,
        constant_length=length_of(aggregation),
        rejection_denominator=RejectionDenominator.KEPT,
        batch_normalise=True,
        kl_coefficient=0.1,
    )
    tokens = fixture_tokens(config, ref=True).take(torch.arange(tokens_left))
    logp = torch.full((tokens_left,), float("nan"), requires_grad=True)
    plan = prepare_step(config, tokens)
    terms = loss_of(config, plan, logp)
    terms.loss.backward()
    assert logp.grad is not None
    assert terms.loss == 0
    assert logp.grad.tolist() == [0] * tokens_left
    assert terms.sums == LossSums(non_finite=tokens_left)


VARIANTS = [
    (correction, proximal, estimator, dual)
    for correction, proximal, estimator, dual in itertools.product(
        Correction, Proximal, (KlEstimator.K2, KlEstimator.K3), (None, 3.0)
    )
    if proximal is not Proximal.BYPASS or correction is Correction.NONE
]
DIVERGENCES = {
    Correction.K2_RS: {"correction_high": 0.1},
    Correction.K3_RS: {"correction_high": 1.0},
    Correction.KPOP: {"correction_high": 0.05},
}
SAME_TRAJECTORIES = {Correction.K2_RS, Correction.K3_RS}
"""Gates that drop the trajectory of the fixture that `geometric_rs` drops, too."""


@pytest.mark.parametrize(("correction", "proximal", "estimator", "dual"), VARIANTS)
def test_extreme_ratios_stay_finite_in_every_variant(correction, proximal, estimator, dual):
    config = ObjectiveConfig(
        correction=correction,
        proximal=proximal,
        kl_coefficient=0.1,
        kl_estimator=estimator,
        dual_clip=dual,
        **DIVERGENCES.get(correction, {}),
    )
    trainer = torch.tensor([-1.0, -1.0, -1.0, -100.0, -100.0, -0.5])
    tokens = StepTokens(
        sequence=torch.tensor([0, 1, 2, 3, 4, 5]),
        sequences=6,
        advantage=torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0, 1.0]),
        truncated=torch.zeros(6, dtype=torch.bool),
        logp_behaviour=torch.tensor([-100.0, -100.0, -100.0, -1.0, -1.0, -0.5]),
        logp_old=trainer,
        logp_now=trainer,
        logp_ref=torch.tensor([-100.0, -1.0, -100.0, -1.0, -1e4, -0.6]),
        blend=torch.tensor([1.0, 0.5, 1.0, 1.0, 0.5, 1.0]),
    )
    runs = [(tokens, trainer + drift) for drift in (0.0, 50.0, -50.0)]
    if not needs_old_pass(config, 1):
        runs.append((replace(tokens, logp_old=None, logp_now=None), trainer.clone()))
    for step, values in runs:
        logp = values.requires_grad_()
        terms = loss_of(config, prepare_step(config, step), logp)
        terms.loss.backward()
        assert logp.grad is not None
        assert terms.loss.shape == ()
        assert terms.loss.isfinite()
        assert logp.grad.isfinite().all()
        assert terms.sums.log_ratios_clamped >= 5
        assert logp.grad[~terms.gate.in_gradient].tolist() == [0] * int((~terms.gate.in_gradient).sum())


def test_variants_differ_where_they_should():
    losses: set[float] = set()
    variants = [
        (correction, proximal, estimator, dual)
        for correction, proximal, estimator, dual in VARIANTS
        if correction not in SAME_TRAJECTORIES
        if proximal is not Proximal.LOGLINEAR or (correction in (Correction.NONE, Correction.TOKEN_TIS) and not dual)
    ]
    for correction, proximal, estimator, dual in variants:
        bounded = correction not in (Correction.SEQUENCE_TIS, Correction.NONE, *DIVERGENCES)
        config = ObjectiveConfig(
            correction=correction,
            proximal=proximal,
            kl_coefficient=0.1,
            kl_estimator=estimator,
            dual_clip=dual,
            **({"correction_low": 0.6} if bounded else DIVERGENCES.get(correction, {})),
        )
        tokens = replace(
            fixture_tokens(config, ref=True),
            logp_now=theta().detach(),
            blend=torch.tensor([0.75, 0.5, 0.5, 0.9, 0.0, 0.25, 0.5, 0.75, 0.5], dtype=torch.float64),
        )
        terms = loss_of(config, prepare_step(config, tokens), theta())
        losses.add(round(float(terms.loss.detach()), 9))
    assert len(losses) == len(variants)
