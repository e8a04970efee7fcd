"""The worked examples of single objectives and gates, to the last figure given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_fixture import (
    FIXTURE,
    MASK,
    SEQUENCE,
    SEQUENCES,
    VECTORS,
    close,
    fixture_tokens,
    flat,
    group_of,
    loss_of,
    sampled,
    theta,
)

from fathom.config.families import Aggregation, Correction, KlPlacement, ObjectiveKind, PolicyLossKind
from fathom.config.objective import ObjectiveConfig
from fathom.core.ids import TrajectoryId
from fathom.trainer.objective.corrections import CORRECTIONS, binary_kl, off_policy_mask
from fathom.trainer.objective.credit.assign import BatchTokens, assign_credit
from fathom.trainer.objective.credit.returns import Chains, generalised_advantages, token_rewards, whitened
from fathom.trainer.objective.credit.value_loss import value_loss, value_micro_batch_loss
from fathom.trainer.objective.plan import StepTokens, prepare_step
from fathom.trainer.objective.policy_loss import (
    POLICY_LOSSES,
    PolicyTokens,
    ProximalInputs,
    loglinear,
    loglinear_blend,
)

NAMED: dict[str, Any] = json.loads(Path(__file__).with_name("named_vectors.json").read_text())
GROUP = group_of(FIXTURE["reward"])
NAMES = tuple(GROUP.rewards)


def of_kind(kind: ObjectiveKind, **options: Any) -> ObjectiveConfig:
    return ObjectiveConfig(kind=kind, correction=Correction.NONE, **options)


def losses(config: ObjectiveConfig, tokens: StepTokens, logp: torch.Tensor) -> torch.Tensor:
    """Loss of each token, before aggregation."""
    assert tokens.logp_old is not None
    return POLICY_LOSSES[config.declaration.loss](
        config,
        PolicyTokens(
            logp=logp,
            logp_proximal=tokens.logp_old,
            logp_behaviour=tokens.logp_behaviour,
            advantage=tokens.advantage,
        ),
    ).loss


def fixture_batch(*, ref: bool = False, values: bool = False) -> BatchTokens:
    """All tokens of the fixture; S3 has none with loss."""
    return BatchTokens(
        sequence=SEQUENCE,
        trajectories=NAMES,
        place=torch.arange(len(SEQUENCE)),
        truncated=torch.zeros(len(SEQUENCE), dtype=torch.bool),
        logp_behaviour=flat(FIXTURE["logp_rollout"]),
        logp_old=flat(FIXTURE["logp_old"]),
        logp_ref=flat(FIXTURE["logp_ref"]) if ref else None,
        values=torch.zeros(len(SEQUENCE)) if values else None,
    )


def test_every_policy_loss_is_implemented():
    assert set(POLICY_LOSSES) == set(PolicyLossKind)


@pytest.mark.parametrize("name", ["eps_0.2_0.28", "eps_3e-4_4e-4"])
def test_gspo(name):
    expected = NAMED["gspo"]["expected"]
    low, high = (float(part) for part in name.removeprefix("eps_").split("_"))
    config = of_kind(ObjectiveKind.GSPO, clip_low=low, clip_high=high)
    tokens = replace(fixture_tokens(config), logp_now=theta().detach())
    plan, logp = prepare_step(config, tokens), theta()
    assert plan.sequence_log_ratio is not None
    close(plan.sequence_log_ratio.exp(), torch.tensor(expected["s"], dtype=torch.float64)[SEQUENCE])
    terms = loss_of(config, plan, logp)
    close(terms.loss.detach(), expected[name]["mean_over_valid_sequences"])
    terms.loss.backward()
    assert logp.grad is not None
    close(logp.grad * 3, flat(expected[name]["dseqloss_dlogp_token"]))
    assert terms.sums.clipped == sum(
        sum(map(int, row)) * clipped for row, clipped in zip(FIXTURE["mask"], expected[name]["clipped"], strict=True)
    )


@pytest.mark.parametrize(("name", "low", "high"), [("no_lower_eps_high_2", 1.0, 2.0), ("0.2_0.28", 0.2, 0.28)])
def test_cispo(name, low, high):
    expected = NAMED["cispo"]["expected"][name]
    config, logp = of_kind(ObjectiveKind.CISPO, clip_low=low, clip_high=high), theta()
    made = losses(config, fixture_tokens(config), logp)
    close(made.detach(), flat(expected["token_loss"]))
    made.sum().backward()
    close(logp.grad, flat(expected["dloss_dlogp_token"]))
    close(loss_of(config, prepare_step(config, fixture_tokens(config)), theta()).loss.detach(), expected["token_mean"])


def test_the_defaults_of_cispo_have_no_lower_bound():
    config = ObjectiveConfig(kind=ObjectiveKind.CISPO)
    assert (1 - config.clip_low, 1 + config.clip_high) == (0, 3)


def test_reinforce_pp():
    inputs, expected = NAMED["reinforce_pp"]["inputs"], NAMED["reinforce_pp"]["expected"]
    config = of_kind(
        ObjectiveKind.REINFORCE_PP,
        kl_coefficient=inputs["beta"],
        kl_placement=KlPlacement.REWARD,
        gamma=inputs["gamma"],
        whiten=False,
    )
    close(assign_credit(config, [GROUP], fixture_batch(ref=True)).advantages, flat(expected["returns"]))
    white = config.model_copy(update={"whiten": True})
    close(assign_credit(white, [GROUP], fixture_batch(ref=True)).advantages, flat(expected["advantage"]))


def test_reinforce_pp_baseline():
    expected = NAMED["reinforce_pp_baseline"]["expected"]
    config = of_kind(ObjectiveKind.REINFORCE_PP_BASELINE)
    close(assign_credit(config, [GROUP], fixture_batch()).advantages, flat(expected["advantage"]))


def test_rloo():
    expected = NAMED["rloo_reinforce"]["expected"]
    config = of_kind(ObjectiveKind.RLOO)
    tokens = fixture_tokens(config)
    close(losses(config, tokens, theta()).detach(), flat(expected["token_loss"]))
    terms = loss_of(config, prepare_step(config, tokens), theta())
    close(terms.loss.detach(), expected["mean_over_valid_sequences_of_sums"])
    by_token = of_kind(ObjectiveKind.RLOO, aggregation=Aggregation.TOKEN_MEAN)
    close(loss_of(by_token, prepare_step(by_token, tokens), theta()).loss.detach(), expected["token_mean"])


def gae() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards, advantages, returns) of all tokens of S1, the tool's included; it is not valid."""
    inputs = NAMED["gae_masked"]["inputs"]
    valid = torch.tensor(inputs["mask"]).bool()
    chains = Chains.of(torch.zeros(5).long(), torch.arange(5), valid, 1)
    old, ref = (torch.tensor(FIXTURE[name][1], dtype=torch.float64) for name in ("logp_old", "logp_ref"))
    rewards = token_rewards(chains, torch.tensor([inputs["reward"]]), inputs["kl_coef"] * (old - ref))
    values = torch.tensor(inputs["values"], dtype=torch.float64)
    return rewards, *generalised_advantages(chains, rewards, values, inputs["gamma"], inputs["lambda"])


def test_generalised_advantages():
    expected = NAMED["gae_masked"]["expected"]
    for made, name in zip(gae(), ("token_reward", "advantage", "return"), strict=True):
        close(made, expected[name])


def test_actor_of_ppo():
    expected = NAMED["ppo_actor_with_gae"]["expected"]
    config = of_kind(ObjectiveKind.PPO)
    mine = SEQUENCE == 1
    tokens = replace(
        fixture_tokens(config),
        advantage=torch.zeros(len(SEQUENCE), dtype=torch.float64).masked_scatter(mine, gae()[1][[0, 1, 3, 4]]),
    )
    made = losses(config, tokens, theta()).detach()[mine]
    close(made, [value for value, mask in zip(expected["token_loss"], FIXTURE["mask"][1], strict=True) if mask])
    close(made.mean(), expected["token_mean"])


def test_value_loss():
    inputs, expected = NAMED["value_loss"]["inputs"], NAMED["value_loss"]["expected"]
    kept = torch.tensor(FIXTURE["mask"][1]).bool()
    new, old, returns = (
        torch.tensor(inputs[name], dtype=torch.float64)[kept] for name in ("new_values", "old_values", "returns")
    )
    made = value_loss(new, old, returns, inputs["value_clip"])
    close(made.loss, torch.tensor(expected["token_loss"], dtype=torch.float64)[kept])
    close(made.loss.mean(), expected["mean"])
    close(made.loss.mean() / 2, expected["with_half_factor"])
    close(made.clipped.double().mean(), expected["clip_fraction"])


def test_the_critic_is_trained_on_the_tokens_of_the_policy():
    config = ObjectiveConfig(kind=ObjectiveKind.PPO)
    credit = assign_credit(config, [GROUP], fixture_batch(values=True))
    tokens = replace(fixture_tokens(config), values=torch.zeros(9).double(), returns=credit.returns)
    values = torch.full((9,), 0.25, dtype=torch.float64, requires_grad=True)
    loss, sums = value_micro_batch_loss(config, prepare_step(config, tokens), values)
    assert credit.returns is not None
    close(loss.detach(), (0.25 - credit.returns).square().maximum((0.2 - credit.returns).square()).mean())
    assert (sums.tokens, sums.non_finite) == (9, 0)
    assert sums.explained_variance == pytest.approx(0)


def test_whitening_does_not_cancel():
    inputs, expected = (NAMED["whitening_one_pass_cancellation_fp32"][part] for part in ("inputs", "expected"))
    values = torch.tensor(inputs["values"], dtype=torch.float32)
    made = whitened(values, torch.ones(4, dtype=torch.bool))
    variance = expected["two_pass"]
    close(made, (values.double() - values.double().mean()) / (variance + 1e-8) ** 0.5)


def test_loglinear():
    inputs, expected = NAMED["loglinear_proximal"]["inputs"], NAMED["loglinear_proximal"]["expected"]
    blend = loglinear_blend(torch.tensor(inputs["token_versions"]), int(inputs["current_version"]))
    close(blend, expected["alpha"])
    behaviour, now = (torch.tensor(inputs[name]).double() for name in ("logp_behav", "logp_theta"))
    made = loglinear(ProximalInputs(logp_behaviour=behaviour, logp_old=now, logp_now=now, blend=blend))
    close(made, expected["logp_prox"])


def test_icepop_from_zero():
    vector = NAMED["icepop_from_zero"]
    made = CORRECTIONS[Correction.ICEPOP](sampled(), vector["inputs"]["alpha"], vector["inputs"]["beta"])
    close(made.weights, flat(vector["expected"]["weight"]))


def test_token_rejection():
    inputs, expected = NAMED["token_RS_mask"]["inputs"], NAMED["token_RS_mask"]["expected"]
    made = CORRECTIONS[Correction.TOKEN_RS](sampled(), inputs["low"], inputs["high"])
    close(made.weights, flat(expected["mask"]))
    assert int((~made.popped).sum()) == expected["kept_tokens"]


@pytest.mark.parametrize("threshold", ["0.01", "0.2"])
def test_rejection_by_the_mean_of_k3(threshold):
    expected = NAMED["K_statistics_per_sequence"]["expected"]
    made = CORRECTIONS[Correction.K3_RS](sampled(), 0.0, float(threshold))
    kept = torch.tensor(expected[f"k3_RS_keep_at_{threshold}"])[SEQUENCE]
    assert made.vetoed.tolist() == (~kept).tolist()
    means = sampled().sequence_means(torch.expm1(sampled().log_ratio) - sampled().log_ratio)
    close(means, expected["k3_mean"])


def test_rejection_by_the_mean_of_k2():
    expected = NAMED["K_statistics_per_sequence"]["expected"]
    close(sampled().sequence_means(sampled().log_ratio.square() / 2), expected["k2_mean"])
    close(sampled().sequence_means(-sampled().log_ratio), expected["k1_mean"])
    between = (expected["k2_mean"][0] + expected["k2_mean"][1]) / 2
    made = CORRECTIONS[Correction.K2_RS](sampled(), 0.0, between)
    assert SEQUENCE[made.vetoed].unique().tolist() == [1, 2]


def test_kpop():
    inputs, expected = NAMED["kpop_binary_kl"]["inputs"], NAMED["kpop_binary_kl"]["expected"]
    old, behaviour = flat(FIXTURE["logp_old"]), flat(FIXTURE["logp_rollout"])
    close(binary_kl(old, behaviour), flat(expected["KL_b(old||rollout)"]))
    close(binary_kl(behaviour, old), flat(expected["KL_b(rollout||old)"]))
    made = CORRECTIONS[Correction.KPOP](sampled(), 0.0, inputs["upper"])
    assert (~made.popped).tolist() == flat(expected["keep"]).bool().tolist()


@pytest.mark.parametrize(
    ("name", "policy"),
    [("off_policy_sequence_mask", "logp_theta"), ("off_policy_sequence_mask_case2", "logp_ref")],
)
def test_off_policy_mask(name, policy):
    inputs, expected = NAMED[name]["inputs"], NAMED[name]["expected"]
    advantage = fixture_tokens(ObjectiveConfig()).advantage
    log_ratio = flat(FIXTURE["logp_old"]) - flat(FIXTURE[policy])
    masked = off_policy_mask(log_ratio, advantage, SEQUENCE, SEQUENCES, inputs["delta"])
    assert masked.tolist() == torch.tensor(expected["masked"])[SEQUENCE].tolist()


def test_the_off_policy_mask_compares_the_behaviour_policy_with_the_policy_before_the_step():
    config = ObjectiveConfig(correction=Correction.NONE, off_policy_mask=0.0)
    now = flat(FIXTURE["logp_rollout"]) + torch.tensor([-0.1, -0.1, 0.1, *[-0.1] * 4, 0.1, 0.1])
    plan = prepare_step(config, replace(fixture_tokens(config), logp_now=now))
    assert plan.gate is not None
    assert SEQUENCE[~plan.gate.in_gradient].unique().tolist() == [0], "only S0 is negative, and it became less likely"


@pytest.mark.parametrize(("kind", "name"), [(ObjectiveKind.DPPO, "dppo"), (ObjectiveKind.IPO, "ipo")])
def test_regions(kind, name):
    inputs, expected = NAMED["dppo_and_ipo"]["inputs"], NAMED["dppo_and_ipo"]["expected"]
    config = ObjectiveConfig(kind=kind)
    assert config.ratio_penalty == inputs["kl_tau"]
    assert config.clip_high == (inputs["dppo_mask"] if kind is ObjectiveKind.DPPO else inputs["ipo_threshold"])
    tokens = fixture_tokens(config)
    close(losses(config, tokens, theta()).detach(), flat(expected[f"{name}_token_loss"]))
    close(loss_of(config, prepare_step(config, tokens), theta()).loss.detach(), expected[f"{name}_token_mean"])


def test_the_fixture_is_whole():
    assert sum(MASK) == len(SEQUENCE)
    assert [TrajectoryId(name) for name in NAMES] == list(NAMES)
    assert "fixture" in VECTORS
