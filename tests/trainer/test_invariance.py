"""The step's loss and gradient do not depend on how its rows were cut into micro-batches, nor on their order."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.families import Aggregation, Correction, KlEstimator, Proximal, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.objective import LossSums, micro_batch_loss
from fathom.trainer.objective.plan import StepTokens, needs_old_pass, prepare_step

CORRECTIONS = {
    Correction.NONE: {},
    Correction.TOKEN_TIS: {},
    Correction.ICEPOP: {"correction_low": 0.5, "correction_high": 5.0},
    Correction.SEQUENCE_TIS: {},
    Correction.SEQUENCE_MIS: {"correction_low": 0.2, "correction_high": 4.0},
    Correction.GEOMETRIC_RS: {"correction_low": 0.7, "correction_high": 1.4},
}


@st.composite
def configs(draw):
    aggregation = draw(st.sampled_from(Aggregation))
    proximal = draw(st.sampled_from(Proximal))
    correction = Correction.NONE if proximal is Proximal.BYPASS else draw(st.sampled_from(Correction))
    options = dict(CORRECTIONS[correction])
    if correction is not Correction.NONE:
        options["batch_normalise"] = draw(st.booleans())
    return ObjectiveConfig(
        aggregation=aggregation,
        constant_length=7 if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None,
        proximal=proximal,
        correction=correction,
        veto=draw(st.sampled_from((None, 0.05))),
        rejection_denominator=draw(st.sampled_from(RejectionDenominator)),
        kl_coefficient=0.1,
        kl_estimator=draw(st.sampled_from(KlEstimator)),
        dual_clip=draw(st.sampled_from((None, 2.0))),
        mask_truncated=draw(st.booleans()),
        **options,
    )


@st.composite
def steps(draw):
    """(rows as lengths and trajectories, cut of a permutation of the rows, seed of the figures)."""
    sequences = draw(st.integers(1, 5))
    rows = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, sequences - 1)), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    return sequences, rows, order, cuts, draw(st.integers(0, 2**31))


def random_tokens(sequences: int, rows: list[tuple[int, int]], seed: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([trajectory for length, trajectory in rows for _ in range(length)])

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(sequence), generator=random, dtype=torch.float64)

    old = -3 * torch.rand(len(sequence), generator=random, dtype=torch.float64)
    behaviour, theta, reference = old + noise(0.6), old + noise(0.3), old + noise(0.5)
    if seed % 3 == 0:
        old[0] = float("nan")
    tokens = StepTokens(
        sequence=sequence,
        sequences=sequences,
        advantage=torch.randn(sequences, generator=random, dtype=torch.float64)[sequence].to(dtype),
        truncated=(torch.rand(sequences, generator=random) < 0.3)[sequence],
        logp_behaviour=behaviour.to(dtype),
        logp_old=old.to(dtype),
        logp_ref=reference.to(dtype),
    )
    return tokens, theta.to(dtype)


def run(config: ObjectiveConfig, tokens: StepTokens, theta: torch.Tensor, micro_batches: list[torch.Tensor]):
    plan, logp = prepare_step(config, tokens), theta.clone().requires_grad_()
    sums = LossSums()
    for index in micro_batches:
        terms = micro_batch_loss(config, plan.take(index), logp[index])
        terms.loss.backward()
        sums += terms.sums
    assert logp.grad is not None
    return sums, logp.grad


def cut_rows(rows: list[tuple[int, int]], order: list[int], cuts: list[int]) -> list[torch.Tensor]:
    starts = [0]
    for length, _ in rows:
        starts.append(starts[-1] + length)
    bounds = [0, *cuts, len(rows)]
    return [
        torch.tensor([t for row in order[a:b] for t in range(starts[row], starts[row + 1])], dtype=torch.int64)
        for a, b in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@settings(max_examples=150, deadline=None)
@given(config=configs(), step=steps(), old_pass=st.booleans())
def test_any_cut_and_order_of_the_rows_gives_the_same_loss_and_gradient(dtype, tolerance, config, step, old_pass):
    sequences, rows, order, cuts, seed = step
    tokens, theta = random_tokens(sequences, rows, seed, dtype)
    if not old_pass and not needs_old_pass(config, 1):
        tokens = replace(tokens, logp_old=None)
    whole, whole_gradient = run(config, tokens, theta, [torch.arange(len(theta))])
    cut, cut_gradient = run(config, tokens, theta, cut_rows(rows, order, cuts))
    scale = max(1.0, float(whole_gradient.abs().max()))
    assert cut.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance * scale)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=tolerance, atol=tolerance * scale)
    assert (cut.tokens, cut.clipped, cut.non_finite) == (whole.tokens, whole.clipped, whole.non_finite)
    assert cut.log_ratios_clamped == whole.log_ratios_clamped


@settings(max_examples=60, deadline=None)
@given(config=configs(), step=steps())
def test_training_every_trajectory_twice_changes_no_mean(config, step):
    sequences, rows, _, _, seed = step
    tokens, theta = random_tokens(sequences, rows, seed, torch.float64)
    twice = torch.arange(len(theta)).repeat(2)
    doubled = replace(
        tokens.take(twice),
        sequence=torch.cat((tokens.sequence, tokens.sequence + sequences)),
        sequences=2 * sequences,
    )
    once, _ = run(config, tokens, theta, [torch.arange(len(theta))])
    both, _ = run(config, doubled, theta[twice], [torch.arange(len(twice))])
    assert both.loss == pytest.approx(once.loss, rel=1e-12, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(config=configs(), step=steps())
def test_a_trajectory_without_tokens_changes_only_the_mean_over_all_trajectories(config, step):
    sequences, rows, _, _, seed = step
    tokens, theta = random_tokens(sequences, rows, seed, torch.float64)
    more = replace(tokens, sequences=sequences + 1)
    everything = [torch.arange(len(theta))]
    before, after = run(config, tokens, theta, everything)[0].loss, run(config, more, theta, everything)[0].loss
    by_all = config.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    assert after == pytest.approx(before * sequences / (sequences + 1) if by_all else before, rel=1e-12, abs=1e-14)
