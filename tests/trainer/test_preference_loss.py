"""DPO: its formula by hand, what it does not depend on, and that garbage stays out."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.tuning.preference import PreferenceObjectiveConfig
from fathom.trainer.objective.preference import PreferenceSums, preference_loss, side_sums

torch.set_num_threads(1)
SIDE = torch.tensor([0, 0, 1, 1, 1])
LOGP = torch.tensor([-1.0, -0.5, -0.25, -2.0, -1.5], dtype=torch.float64)
REFERENCE = torch.tensor([[-2.0, -3.0]], dtype=torch.float64)


def one(**options):
    logp = LOGP.clone().requires_grad_()
    loss, sums = preference_loss(PreferenceObjectiveConfig(**options), logp, SIDE, REFERENCE, 1)
    loss.backward()
    return float(loss.detach()), sums, logp.grad


def test_the_loss_of_a_pair_by_hand():
    # chosen: -1.5 - -2 = 0.5; rejected: -3.75 - -3 = -0.75; h = beta * 1.25
    loss, sums, gradient = one(beta=0.4)
    h = 0.5
    assert loss == pytest.approx(math.log1p(math.exp(-h)))
    assert (sums.margin, sums.chosen_reward, sums.rejected_reward) == pytest.approx((h, 0.2, -0.3))
    assert (sums.pairs, sums.correct, sums.tokens, sums.non_finite) == (1, 1.0, 5, 0)
    slope = 0.4 / (1 + math.exp(h))
    assert gradient.tolist() == pytest.approx([-slope, -slope, slope, slope, slope])


def test_label_smoothing_mixes_in_the_other_way_round():
    h = 0.5
    loss, _, _ = one(beta=0.4, label_smoothing=0.1)
    assert loss == pytest.approx(0.9 * math.log1p(math.exp(-h)) + 0.1 * math.log1p(math.exp(h)))


def test_length_normalisation_compares_means():
    loss, sums, _ = one(beta=0.4, length_normalised=True)
    h = 0.4 * (0.5 / 2 + 0.75 / 3)
    assert sums.margin == pytest.approx(h)
    assert loss == pytest.approx(math.log1p(math.exp(-h)))


def test_imitation_adds_the_mean_loss_of_the_chosen_answer():
    plain, _, _ = one(beta=0.4)
    loss, _, gradient = one(beta=0.4, imitation=2.0)
    assert loss == pytest.approx(plain + 2.0 * 1.5 / 2)
    assert gradient[2:].tolist() == pytest.approx(one(beta=0.4)[2][2:].tolist())


def test_at_the_reference_the_loss_is_that_of_a_coin():
    loss, sums = preference_loss(PreferenceObjectiveConfig(), LOGP, SIDE, side_sums(LOGP, SIDE, 2).view(1, 2), 1)
    assert float(loss) == pytest.approx(math.log(2))
    assert sums.correct == 0.5


@st.composite
def cases(draw):
    """(lengths of both sides of each pair, a cut of a permutation of the pairs, seed)."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6))
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    return lengths, order, cuts, draw(st.integers(0, 2**31))


def run(config, logp, lengths, reference, parts):
    """Sums and gradient over micro-batches of pairs."""
    starts = [0, *itertools.accumulate(sum(both) for both in lengths)]
    logp = logp.clone().requires_grad_()
    sums = PreferenceSums()
    for part in parts:
        places = torch.tensor([t for pair in part for t in range(starts[pair], starts[pair + 1])], dtype=torch.int64)
        sides = [
            2 * at + which for at, pair in enumerate(part) for which in (0, 1) for _ in range(lengths[pair][which])
        ]
        side = torch.tensor(sides, dtype=torch.int64)
        loss, told = preference_loss(config, logp[places], side, reference[part], len(lengths))
        loss.backward()
        sums += told
    return sums, logp.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@settings(max_examples=100, deadline=None)
@given(
    case=cases(),
    options=st.fixed_dictionaries(
        {
            "beta": st.sampled_from((0.1, 1.0)),
            "label_smoothing": st.sampled_from((0.0, 0.2)),
            "length_normalised": st.booleans(),
            "imitation": st.sampled_from((0.0, 0.5)),
        }
    ),
    broken=st.booleans(),
)
def test_no_cut_and_no_order_changes_loss_or_gradient(dtype, tolerance, case, options, broken):
    lengths, order, cuts, seed = case
    config = PreferenceObjectiveConfig(**options)
    random = torch.Generator().manual_seed(seed)
    tokens = sum(map(sum, lengths))
    logp = (-3 * torch.rand(tokens, generator=random, dtype=torch.float64)).to(dtype)
    reference = -5 * torch.rand(len(lengths), 2, generator=random, dtype=torch.float64)
    if broken:
        logp[0] = torch.nan
    bounds = [0, *cuts, len(lengths)]
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
    whole, whole_gradient = run(config, logp, lengths, reference, [list(range(len(lengths)))])
    cut, cut_gradient = run(config, logp, lengths, reference, parts)
    assert cut.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=tolerance, atol=tolerance)
    assert (cut.pairs, cut.non_finite) == (whole.pairs, whole.non_finite) == (len(lengths) - broken, int(broken))
    assert (cut.margin, cut.correct) == pytest.approx((whole.margin, whole.correct), rel=1e-12, abs=1e-12)
    assert torch.isfinite(whole_gradient).all()
    assert not broken or not whole_gradient[: sum(lengths[0])].any(), "a broken pair has no gradient at all"


def test_far_from_the_reference_everything_stays_finite():
    logp = torch.tensor([-1e4, -1e-3], requires_grad=True)
    loss, _ = preference_loss(
        PreferenceObjectiveConfig(beta=1.0), logp, torch.tensor([0, 1]), torch.zeros(1, 2, dtype=torch.float64), 1
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4, rel=1e-3)
    assert logp.grad.tolist() == pytest.approx([-1.0, 1.0])
