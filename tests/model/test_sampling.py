"""Which tokens survive, and what is drawn from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.records.sampling import SamplingParams
from fathom.model.distribution.blockwise import Blockwise
from fathom.model.distribution.kept_sets import kept_sets

torch.set_num_threads(1)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 12, 600]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)


def random_logits(rows: int, vocab: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


ROUNDING = 5e-7
"""By how much the mass of likelier tokens may be off in float32."""


def defined(scaled: torch.Tensor, params: SamplingParams, slack: float = 0.0) -> list[int]:
    """The definition, token by token, in float64; `slack`: mass by which top_p is taken to be larger."""
    probs = torch.softmax(scaled.double(), dim=0).tolist()
    kept = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = kept[: params.top_k or len(kept)]
    if params.top_p < 1:
        total, mass, survivors = math.fsum(probs[token] for token in kept), 0.0, []
        for token in kept:
            if mass < (params.top_p - 1e-6 + slack) * total:
                survivors.append(token)
            mass += probs[token]
        kept = survivors
    return sorted(token for token in kept if probs[token] >= params.min_p * probs[kept[0]])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(SAMPLING, min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([17, 700, 3000]),
    st.sampled_from([0.1, 2.0, 6.0]),
)
def test_the_kept_set_is_the_one_defined(params: list[SamplingParams], seed: int, vocab: int, scale: float) -> None:
    """Flat and peaked distributions; vocabularies of one block, and of a whole number of blocks and a rest."""
    scaled = random_logits(len(params), vocab, seed, scale)
    kept = kept_sets(scaled, params)
    assert (kept is not None) == any(own.truncates for own in params)
    for row, own in enumerate(params):
        if kept is not None:
            ids = kept.of(row)
            got = list(range(vocab)) if ids is None else ids.tolist()
            assert got == sorted(set(got))
            assert set(defined(scaled[row], own, -ROUNDING)) <= set(got) <= set(defined(scaled[row], own, ROUNDING))


def test_of_equally_likely_tokens_the_first_are_kept() -> None:
    kept = kept_sets(torch.zeros(3, 300), [SamplingParams(top_k=2), SamplingParams(top_p=0.01), SamplingParams()])
    assert kept is not None
    assert [None if (ids := kept.of(row)) is None else ids.tolist() for row in range(3)] == [[0, 1], [0, 1, 2], None]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_diverged_is_full_and_spoils_no_other(wrong: float) -> None:
    scaled = random_logits(3, 300, 0)
    healthy = kept_sets(scaled, [SamplingParams(top_p=0.9)] * 3)
    scaled[1, 7] = wrong
    kept = kept_sets(scaled, [SamplingParams(top_p=0.9)] * 3)
    assert kept is not None
    assert healthy is not None
    assert kept.of(1) is None
    for row in (0, 2):
        np.testing.assert_array_equal(kept.of(row), healthy.of(row))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([2, 128, 700, 5000]), st.sampled_from([0.1, 3.0, 30.0]))
def test_inversion_meets_the_cumulative_distribution(seed: int, vocab: int, scale: float) -> None:
    """Of the float64 distribution, to within the rounding of float32 probabilities; both ends of [0, 1) included."""
    values = random_logits(1, vocab, seed, scale).expand(52, vocab)
    uniforms = np.concatenate([np.random.default_rng(seed).random(50), [0.0, 1.0 - 2.0**-53]])
    places = Blockwise.of(values).invert(uniforms)
    probs = torch.softmax(values[0].double(), dim=0).numpy()
    after = np.cumsum(probs)
    assert np.all(after[places] > uniforms - 1e-5)
    assert np.all(after[places] - probs[places] < uniforms + 1e-5)
    assert np.all(probs[places] > 0)


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    """Absent ones at both ends and in between, with the uniforms most likely to hit them."""
    values = torch.full((1, 400), -torch.inf)
    values[0, [5, 130, 131, 260, 390]] = torch.tensor([0.0, 1.0, -90.0, 2.0, 0.5])
    uniforms = np.concatenate([[0.0, 1.0 - 2.0**-53], np.linspace(0, 1, 300, endpoint=False)])
    places = Blockwise.of(values.expand(302, 400)).invert(uniforms)
    assert set(places.tolist()) == {5, 130, 260, 390}
