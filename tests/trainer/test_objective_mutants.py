"""Faults that trainers had, each put into one function, and the check that the right function passes and they fail.

A mutant goes through the same door as what it stands for: an entry of a family, or the loss of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_fixture import FIXTURE, SEQUENCE, VECTORS, close, fixture_tokens, flat, theta
from random_steps import Loss, RandomStep, random_tokens, run
from test_named_vectors import NAMED

from fathom.config.families import Advantage, Aggregation, Correction, KlEstimator, ObjectiveKind, PolicyLossKind
from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.advantages import ADVANTAGES, STD_EPSILON
from fathom.trainer.objective.aggregation import AGGREGATIONS, count
from fathom.trainer.objective.corrections import CORRECTIONS, SampledTokens
from fathom.trainer.objective.credit.returns import Chains, generalised_advantages, token_rewards, whitened
from fathom.trainer.objective.kl import KL_ESTIMATORS
from fathom.trainer.objective.objective import micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import prepare_step
from fathom.trainer.objective.policy_loss import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyTokens,
    bounded_ratio,
    clipped_policy_loss,
)


def killed(check: Callable[..., None], *mutant: Any) -> None:
    """The check notices."""
    with pytest.raises(AssertionError):
        check(*mutant)


# ---- weights are constants


def check_weights_are_constants(loss: Loss) -> None:
    config = ObjectiveConfig(correction=Correction.TOKEN_TIS)
    tokens, logp = fixture_tokens(config, old="logp_theta"), theta()
    loss(config, prepare_step(config, tokens), TokenOutputs(logprobs=logp)).loss.backward()
    weights = bounded_ratio(flat(FIXTURE["logp_theta"]) - flat(FIXTURE["logp_rollout"])).clamp(max=2.0)
    close(logp.grad, -weights * tokens.advantage / 9)


def weights_with_a_gradient(config, plan, outputs):
    weights = bounded_ratio(outputs.logprobs - plan.tokens.logp_behaviour).clamp(max=2.0)
    return micro_batch_loss(config, replace(plan, gate=replace(plan.gate, weights=weights)), outputs)


def test_a_weight_with_a_gradient_is_noticed():
    check_weights_are_constants(micro_batch_loss)
    killed(check_weights_are_constants, weights_with_a_gradient)


# ---- stop-gradients of single losses


def policy_tokens(config: ObjectiveConfig, logp: torch.Tensor) -> PolicyTokens:
    tokens = fixture_tokens(config)
    assert tokens.logp_old is not None
    means = torch.tensor(NAMED["gspo"]["expected"]["s"], dtype=torch.float64).log()
    return PolicyTokens(
        logp=logp,
        logp_proximal=tokens.logp_old,
        logp_behaviour=tokens.logp_behaviour,
        advantage=tokens.advantage,
        sequence_log_ratio=means[SEQUENCE],
    )


def check_cispo(policy_loss: Callable[[ObjectiveConfig, PolicyTokens], PolicyLoss]) -> None:
    config, logp = ObjectiveConfig(kind=ObjectiveKind.CISPO), theta()
    policy_loss(config, policy_tokens(config, logp)).loss.sum().backward()
    close(logp.grad, flat(NAMED["cispo"]["expected"]["no_lower_eps_high_2"]["dloss_dlogp_token"]))


def cispo_without_a_stop(config, tokens):
    weight = bounded_ratio(tokens.logp - tokens.logp_proximal).clamp(1 - config.clip_low, 1 + config.clip_high)
    return replace(
        POLICY_LOSSES[PolicyLossKind.CLIPPED_WEIGHT](config, tokens), loss=-weight * tokens.advantage * tokens.logp
    )


def test_cispo_without_its_stop_gradient_is_noticed():
    check_cispo(POLICY_LOSSES[PolicyLossKind.CLIPPED_WEIGHT])
    killed(check_cispo, cispo_without_a_stop)
    killed(check_cispo, POLICY_LOSSES[PolicyLossKind.CLIP])


def check_gspo(policy_loss: Callable[[ObjectiveConfig, PolicyTokens], PolicyLoss]) -> None:
    config, logp = ObjectiveConfig(kind=ObjectiveKind.GSPO, clip_low=0.2, clip_high=0.28), theta()
    per_token = torch.bincount(SEQUENCE, minlength=4)[SEQUENCE]
    (policy_loss(config, policy_tokens(config, logp)).loss / per_token).sum().backward()
    close(logp.grad, flat(NAMED["gspo"]["expected"]["eps_0.2_0.28"]["dseqloss_dlogp_token"]))


def _clipped(config: ObjectiveConfig, log_ratio: torch.Tensor, tokens: PolicyTokens) -> PolicyLoss:
    return clipped_policy_loss(
        log_ratio, tokens.advantage, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=None
    )


def gspo_without_a_stop(config, tokens):
    return _clipped(config, tokens.sequence_log_ratio + tokens.logp, tokens)


def gspo_without_a_gradient(config, tokens):
    return _clipped(config, tokens.sequence_log_ratio + 0 * tokens.logp, tokens)


def gspo_by_token(config, tokens):
    return _clipped(config, tokens.logp - tokens.logp_proximal, tokens)


def test_gspo_with_another_ratio_is_noticed():
    check_gspo(POLICY_LOSSES[PolicyLossKind.SEQUENCE_CLIP])
    for mutant in (gspo_without_a_stop, gspo_without_a_gradient, gspo_by_token):
        killed(check_gspo, mutant)


# ---- what one micro-batch must not decide


STEP = RandomStep(sequences=3, rows=[(3, 0), (5, 1), (2, 2), (4, 0)], order=[2, 0, 3, 1], cuts=[1, 2, 2], seed=1)
CUT = (
    ObjectiveConfig(),
    ObjectiveConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
    ObjectiveConfig(kind=ObjectiveKind.GSPO, clip_low=0.2, clip_high=0.2),
)


def check_cuts(loss: Loss) -> None:
    for config in CUT:
        tokens, logp, entropy = random_tokens(config, STEP, torch.float64)
        plain = replace(tokens, logp_ref=None)
        _, whole = run(config, plain, logp, entropy, STEP.whole, loss)
        _, cut = run(config, plain, logp, entropy, STEP.cut, loss)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def mean_per_micro_batch(config, plan, outputs):
    everything = torch.ones_like(plan.tokens.truncated)
    local = count(plan.tokens.sequence, everything, plan.tokens.sequences)
    return micro_batch_loss(config, replace(plan, denominators=local), outputs)


def sequence_ratio_per_micro_batch(config, plan, outputs):
    if plan.sequence_log_ratio is None:
        return micro_batch_loss(config, plan, outputs)
    tokens = plan.tokens
    log_ratio = outputs.logprobs.detach() - tokens.logp_old
    sums = torch.zeros(tokens.sequences, dtype=log_ratio.dtype).index_add(0, tokens.sequence, log_ratio)
    means = sums / torch.bincount(tokens.sequence, minlength=tokens.sequences).clamp(min=1)
    return micro_batch_loss(config, replace(plan, sequence_log_ratio=means[tokens.sequence]), outputs)


def test_what_is_decided_within_a_micro_batch_is_noticed():
    check_cuts(micro_batch_loss)
    killed(check_cuts, mean_per_micro_batch)
    killed(check_cuts, sequence_ratio_per_micro_batch)


# ---- denominators


AGGREGATES = {
    Aggregation.TOKEN_MEAN: "token_mean",
    Aggregation.SEQ_MEAN_TOKEN_MEAN: "seq_mean_token_mean_valid_sequences",
    Aggregation.SEQ_MEAN_TOKEN_SUM: "seq_mean_token_sum_valid_sequences",
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: "seq_mean_token_sum_norm_B_times_L",
}


def check_denominator(mode: Aggregation, coefficients: Callable[..., torch.Tensor]) -> None:
    expected = VECTORS["dapo_clip_higher_0.2_0.28"]["expected"]
    step = count(SEQUENCE, torch.ones(9, dtype=torch.bool), 4)
    made = (coefficients(step, SEQUENCE, 8) * flat(expected["token_loss"])).sum()
    close(made, expected["aggregated"][AGGREGATES[mode]])


def masked_sample_counts_one(step, sequence, length):
    return AGGREGATIONS[Aggregation.TOKEN_MEAN](replace(step, tokens=step.tokens + 1), sequence, length)


def all_sequences(step, sequence, length):
    everyone = replace(step, sequences_with_tokens=step.sequences)
    return AGGREGATIONS[Aggregation.SEQ_MEAN_TOKEN_MEAN](everyone, sequence, length)


@pytest.mark.parametrize("mode", Aggregation)
def test_a_swapped_denominator_is_noticed(mode):
    check_denominator(mode, AGGREGATIONS[mode])
    others = [AGGREGATIONS[other] for other in Aggregation if other is not mode]
    for mutant in (*others, masked_sample_counts_one, all_sequences):
        killed(check_denominator, mode, mutant)


# ---- statistics of groups and batches


def check_std(advantage: Callable[[torch.Tensor], torch.Tensor]) -> None:
    vector = VECTORS["group_advantages"]
    close(
        advantage(torch.tensor(vector["inputs"]["reward"], dtype=torch.float64)), vector["expected"]["GRPO_sample_std"]
    )


def biased_std(rewards):
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + STD_EPSILON)


def test_a_biased_standard_deviation_is_noticed():
    check_std(ADVANTAGES[Advantage.GRPO])
    killed(check_std, biased_std)
    for other in (Advantage.DR_GRPO, Advantage.RLOO, Advantage.MAXRL, Advantage.RAFT):
        killed(check_std, ADVANTAGES[other])


def check_whitening(whiten: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    everything = torch.ones(4, dtype=torch.bool)
    made = whiten(torch.tensor([1000.0, 1000.1, 999.9, 1000.0]), everything)
    assert float(made.double().var(correction=1)) == pytest.approx(1.0, rel=1e-4)


def biased_whitening(values, valid):
    centred = values[valid].double() - values[valid].double().mean()
    return centred / (centred.square().mean() + 1e-8).sqrt()


def one_pass_whitening(values, valid):
    variance = (values.square().mean() - values.mean().square()) * 4 / 3
    return (values - values.mean()) / (variance.clamp(min=0) + 1e-8).sqrt()


def test_a_whitening_that_cancels_or_is_biased_is_noticed():
    check_whitening(whitened)
    killed(check_whitening, biased_whitening)
    killed(check_whitening, one_pass_whitening)


def check_transitions(lay: Callable[..., Chains]) -> None:
    inputs, expected = NAMED["gae_masked"]["inputs"], NAMED["gae_masked"]["expected"]
    mask = torch.tensor(inputs["mask"]).bool()
    chains = lay(torch.zeros(5, dtype=torch.int64), torch.arange(5), mask, 1)
    penalties = inputs["kl_coef"] * torch.tensor(
        [old - ref for old, ref in zip(FIXTURE["logp_old"][1], FIXTURE["logp_ref"][1], strict=True)]
    )
    rewards = token_rewards(chains, torch.tensor([inputs["reward"]]), penalties * mask)
    values = torch.tensor(inputs["values"], dtype=torch.float64)
    made, _ = generalised_advantages(chains, rewards, values, inputs["gamma"], inputs["lambda"])
    torch.testing.assert_close(made[mask], torch.tensor(expected["advantage"]).double()[mask], rtol=1e-6, atol=1e-6)


def tools_are_transitions(sequence, place, valid, sequences):
    return Chains.of(sequence, place, torch.ones_like(valid), sequences)


def backwards(sequence, place, valid, sequences):
    return Chains.of(sequence, -place, valid, sequences)


def test_a_tool_answer_as_a_transition_is_noticed():
    check_transitions(Chains.of)
    killed(check_transitions, tools_are_transitions)
    killed(check_transitions, backwards)


# ---- the KL penalty


def check_reverse_kl_gradient(estimator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Expected gradient of the loss over tokens of the policy, by enumeration, beside that of KL(policy || ref)."""
    inputs = VECTORS["kl_estimator_expected_gradients"]["inputs"]
    logits = torch.tensor(inputs["policy_logits"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(inputs["reference_logits"], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    estimate = (logp.detach().exp() * estimator(logp - reference)).sum()
    assert estimate.requires_grad, "no gradient at all"
    (made,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    close(made, expected)


def test_a_kl_without_a_gradient_is_noticed():
    check_reverse_kl_gradient(KL_ESTIMATORS[KlEstimator.K2])
    killed(check_reverse_kl_gradient, lambda x: KL_ESTIMATORS[KlEstimator.K2](x.detach()))
    killed(check_reverse_kl_gradient, KL_ESTIMATORS[KlEstimator.K1])
    killed(check_reverse_kl_gradient, KL_ESTIMATORS[KlEstimator.K3])


# ---- finite by construction


def check_finite(policy_loss: Callable[[ObjectiveConfig, PolicyTokens], PolicyLoss]) -> None:
    config = ObjectiveConfig()
    logp = torch.tensor([-0.1, -2000.0], requires_grad=True)
    tokens = PolicyTokens(
        logp=logp,
        logp_proximal=torch.tensor([-2000.0, -0.1]),
        logp_behaviour=torch.tensor([-2000.0, -0.1]),
        advantage=torch.tensor([-1.0, 1.0]),
    )
    loss = policy_loss(config, tokens).loss.sum()
    loss.backward()
    assert loss.isfinite()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def without_a_clamp(config, tokens):
    ratio = (tokens.logp - tokens.logp_proximal).exp()
    made = POLICY_LOSSES[PolicyLossKind.CLIP](config, tokens)
    return replace(made, loss=-ratio * tokens.advantage)


def test_a_ratio_that_is_not_clamped_is_noticed():
    check_finite(POLICY_LOSSES[PolicyLossKind.CLIP])
    killed(check_finite, without_a_clamp)


def check_masked_tokens_stay_out(loss: Loss) -> None:
    config = ObjectiveConfig(mask_truncated=True)
    tokens, values = fixture_tokens(config), theta().detach().clone()
    tokens.truncated[SEQUENCE == 1] = True
    values[SEQUENCE == 1] = float("nan")
    logp = values.requires_grad_()
    made = loss(config, prepare_step(config, tokens), TokenOutputs(logprobs=logp)).loss
    made.backward()
    assert made.isfinite()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def masked_by_multiplying(config, plan, outputs):
    made = micro_batch_loss(config, plan, outputs)
    return replace(made, loss=made.loss + (0.0 * outputs.logprobs).sum())


def test_a_mask_that_multiplies_is_noticed():
    check_masked_tokens_stay_out(micro_batch_loss)
    killed(check_masked_tokens_stay_out, masked_by_multiplying)


# ---- corrections


def check_icepop(correction: Callable[[SampledTokens, float, float], Any]) -> None:
    vector = VECTORS["icepop"]
    log_ratio = flat(FIXTURE["logp_old"]) - flat(FIXTURE["logp_rollout"])
    tokens = SampledTokens(
        log_ratio=log_ratio, logp_behaviour=flat(FIXTURE["logp_rollout"]), sequence=SEQUENCE, sequences=4
    )
    made = correction(tokens, vector["inputs"]["alpha"], vector["inputs"]["beta"])
    close(made.weights, flat(vector["expected"]["weight"]))


def test_another_correction_is_noticed():
    check_icepop(CORRECTIONS[Correction.ICEPOP])
    for other in Correction:
        if other is not Correction.ICEPOP:
            killed(check_icepop, CORRECTIONS[other])
    killed(
        check_icepop,
        lambda tokens, low, high: CORRECTIONS[Correction.ICEPOP](
            replace(tokens, log_ratio=-tokens.log_ratio), low, high
        ),
    )
