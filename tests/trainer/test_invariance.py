"""The step's loss and gradient do not depend on how its rows were cut into micro-batches, nor on their order."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import RandomStep, configs, random_tokens, run, run_values, steps, without_old_pass

from fathom.config.families import Aggregation, ObjectiveKind
from fathom.trainer.objective.plan import StepTokens

PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("kind", ObjectiveKind)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), step=steps(), old_pass=st.booleans())
def test_any_cut_and_order_of_the_rows_gives_the_same_loss_and_gradient(
    kind, dtype, tolerance, data, step: RandomStep, old_pass
):
    config = data.draw(configs((kind,)))
    tokens, theta, entropy = random_tokens(config, step, dtype)
    if not old_pass:
        tokens = without_old_pass(config, tokens)
    whole, whole_gradient = run(config, tokens, theta, entropy, step.whole)
    cut, cut_gradient = run(config, tokens, theta, entropy, step.cut)
    scale = max(1.0, float(whole_gradient.abs().max()))
    assert cut.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance * scale)
    same(cut_gradient, whole_gradient, tolerance)
    assert (cut.tokens, cut.clipped, cut.non_finite) == (whole.tokens, whole.clipped, whole.non_finite)
    assert cut.log_ratios_clamped == whole.log_ratios_clamped


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@settings(max_examples=60, deadline=None)
@given(config=configs(), step=steps(), data=st.data())
def test_a_trajectory_may_be_any_number_of_rows_in_any_order(dtype, tolerance, config, step: RandomStep, data):
    """The whole step is laid out anew, token by token: what the trajectories are is all that counts."""
    tokens, theta, entropy = random_tokens(config, step, dtype)
    order = torch.tensor(data.draw(st.permutations(range(len(theta)))))
    before, gradient = run(config, tokens, theta, entropy, step.whole)
    after, laid_out = run(config, tokens.take(order), theta[order], entropy[order], step.whole)
    back = torch.cat((laid_out[: len(theta)][order.argsort()], laid_out[len(theta) :][order.argsort()]))
    same(back, gradient, tolerance)
    assert (after.tokens, after.clipped) == (before.tokens, before.clipped)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@settings(max_examples=60, deadline=None)
@given(config=configs((ObjectiveKind.PPO,)), step=steps())
def test_the_critic_does_not_depend_on_the_cut_either(dtype, tolerance, config, step: RandomStep):
    tokens, _, values = random_tokens(config, step, dtype)
    whole, whole_gradient = run_values(config, tokens, values, step.whole)
    cut, cut_gradient = run_values(config, tokens, values, step.cut)
    same(cut_gradient, whole_gradient, tolerance)
    assert cut.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance)
    assert (cut.tokens, cut.clipped) == (whole.tokens, whole.clipped)


@settings(max_examples=80, deadline=None)
@given(config=configs(), step=steps())
def test_training_every_trajectory_twice_changes_no_mean(config, step: RandomStep):
    tokens, theta, entropy = random_tokens(config, step, torch.float64)
    twice = torch.arange(len(theta)).repeat(2)
    doubled = replace(
        tokens.take(twice),
        sequence=torch.cat((tokens.sequence, tokens.sequence + step.sequences)),
        sequences=2 * step.sequences,
    )
    once, _ = run(config, tokens, theta, entropy, step.whole)
    both, _ = run(config, doubled, theta[twice], entropy[twice], [torch.arange(len(twice))])
    assert both.loss == pytest.approx(once.loss, rel=1e-12, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(config=configs(), step=steps())
def test_a_trajectory_without_tokens_changes_only_the_mean_over_all_trajectories(config, step: RandomStep):
    tokens, theta, entropy = random_tokens(config, step, torch.float64)
    more = replace(tokens, sequences=step.sequences + 1)
    before, after = (run(config, each, theta, entropy, step.whole)[0].loss for each in (tokens, more))
    by_all = config.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    share = step.sequences / (step.sequences + 1) if by_all else 1.0
    assert after == pytest.approx(before * share, rel=1e-12, abs=1e-14)


@settings(max_examples=120, deadline=None)
@given(config=configs(), step=steps(), bad=st.sampled_from((float("nan"), float("inf"), -float("inf"), 1e30)))
def test_garbage_where_a_token_is_masked_changes_nothing(config, step: RandomStep, bad):
    """Tokens masked by the gate, and tokens refused, enter no arithmetic: not even a NaN gets out of them."""
    tokens, theta, entropy = random_tokens(config, step, torch.float64)
    truncated = config.model_copy(update={"mask_truncated": True})
    clean, gradient = run(truncated, tokens, theta, entropy, step.whole)
    masked = tokens.truncated

    def spoilt(column: torch.Tensor | None) -> torch.Tensor | None:
        return None if column is None else column.masked_fill(masked, bad)

    dirty = StepTokens(
        sequence=tokens.sequence,
        sequences=tokens.sequences,
        advantage=tokens.advantage.masked_fill(masked, bad),
        truncated=tokens.truncated,
        logp_behaviour=tokens.logp_behaviour.masked_fill(masked, bad),
        logp_old=spoilt(tokens.logp_old),
        logp_now=spoilt(tokens.logp_now),
        logp_ref=spoilt(tokens.logp_ref),
        blend=spoilt(tokens.blend),
        values=spoilt(tokens.values),
        returns=spoilt(tokens.returns),
    )
    sums, with_garbage = run(
        truncated, dirty, theta.masked_fill(masked, bad), entropy.masked_fill(masked, bad), step.whole
    )
    assert sums == clean
    assert torch.equal(with_garbage, gradient)
    assert gradient.isfinite().all()
