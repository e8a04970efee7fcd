"""The supervised loss: the worked figures, and that no cut and no order changes it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_fixture import FIXTURE, SEQUENCE, SEQUENCES, close, flat

from fathom.config.families import Aggregation
from fathom.trainer.objective.supervised import ImitationSums, coefficients, imitation_loss

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(Aggregation.TOKEN_MEAN, 1.09555555556), (Aggregation.SEQ_MEAN_TOKEN_MEAN, 1.05861111111)],
)
def test_the_worked_figures(aggregation, expected):
    logp = flat(FIXTURE["logp_theta"])
    loss, sums = imitation_loss(coefficients(aggregation, SEQUENCE, SEQUENCES), logp)
    close(loss, expected)
    close(sums.nll, 9.86)
    assert (sums.tokens, sums.non_finite) == (9, 0)


@st.composite
def cases(draw):
    """(conversation of each row and its length, a cut of a permutation of the rows, seed)."""
    conversations = draw(st.integers(1, 4))
    rows = draw(st.lists(st.tuples(st.integers(0, conversations - 1), st.integers(1, 6)), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    return conversations, rows, order, cuts, draw(st.integers(0, 2**31))


def gradient(shares, logp, parts):
    logp = logp.clone().requires_grad_()
    sums = ImitationSums()
    for part in parts:
        loss, told = imitation_loss(shares[part], logp[part])
        loss.backward()
        sums += told
    return sums, logp.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@settings(max_examples=100, deadline=None)
@given(case=cases(), aggregation=st.sampled_from(Aggregation), broken=st.booleans())
def test_no_cut_and_no_order_changes_loss_or_gradient(dtype, tolerance, case, aggregation, broken):
    conversations, rows, order, cuts, seed = case
    length = 7 if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
    sequence = torch.tensor([conversation for conversation, tokens in rows for _ in range(tokens)])
    logp = -3 * torch.rand(len(sequence), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if broken:
        logp[0] = -torch.inf
    shares = coefficients(aggregation, sequence, conversations, length)
    starts = [0, *itertools.accumulate(tokens for _, tokens in rows)]
    places = [torch.arange(starts[row], starts[row + 1]) for row in order]
    bounds = [0, *cuts, len(rows)]
    parts = [torch.cat([torch.zeros(0, dtype=torch.int64), *places[a:b]]) for a, b in itertools.pairwise(bounds)]
    whole, whole_gradient = gradient(shares, logp, [torch.arange(len(sequence))])
    cut, cut_gradient = gradient(shares, logp, parts)
    assert cut.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=tolerance, atol=tolerance)
    assert (cut.tokens, cut.non_finite) == (whole.tokens, whole.non_finite) == (len(sequence) - broken, int(broken))
    assert torch.isfinite(whole_gradient).all()
    assert not broken or whole_gradient[0] == 0.0


def test_the_mean_is_over_the_step_and_not_over_micro_batches():
    """Conversations of 1 and 9 tokens, apart: each token counts a tenth."""
    sequence = torch.tensor([0] + [1] * 9)
    shares = coefficients(Aggregation.TOKEN_MEAN, sequence, 2)
    _, apart = gradient(shares, torch.full((10,), -1.0), [torch.arange(1), torch.arange(1, 10)])
    torch.testing.assert_close(apart, torch.full((10,), -0.1))
