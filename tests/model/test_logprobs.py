from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import VOCAB, random_model

from fathom.core.errors import RecordError
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.model import logprobs
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_logprobs, token_logprobs
from fathom.model.sampling import kept_sets, sampling_distribution

torch.set_num_threads(1)

PROBS = torch.tensor([[0.6, 0.3, 0.1]])


def ones(count):
    return torch.ones(count)


def kept_of(*rows):
    lengths = [len(row) for row in rows]
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    return KeptSets(offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), ids=ids)


def random_logits(rows, vocab=VOCAB, seed=0, scale=4.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_truncated_token_is_renormalised_over_its_kept_set():
    """`pitfalls.md` 17: ln(2/3) is the sampler's, ln(0.6) would be the full vocabulary's."""
    logits, token = PROBS.log(), torch.tensor([0])
    drawn = sampling_distribution(logits, [SamplingParams(top_p=0.9)])
    assert drawn.kept is not None
    assert drawn.kept.tolist() == [[True, True, False]]
    got = token_logprobs(logits, token, ones(1), kept_sets(drawn.kept))
    assert got.item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    assert token_logprobs(logits, token, ones(1), None).item() == pytest.approx(math.log(0.6), abs=1e-6)


def test_an_empty_range_means_the_full_vocabulary():
    logits, tokens = random_logits(3), torch.tensor([4, 5, 6])
    mixed = token_logprobs(logits, tokens, ones(3), kept_of([], [5, 9], []))
    full = token_logprobs(logits, tokens, ones(3), None)
    assert torch.equal(mixed[[0, 2]], full[[0, 2]])
    expected = torch.log_softmax(logits[1, [5, 9]], dim=0)[0]
    torch.testing.assert_close(mixed[1], expected, atol=1e-6, rtol=0)
    assert torch.equal(token_logprobs(logits, tokens, ones(3), kept_of([], [], [])), full)


def test_a_token_outside_its_kept_set_is_refused():
    with pytest.raises(RecordError, match="not in its own kept set"):
        token_logprobs(random_logits(2), torch.tensor([4, 7]), ones(2), kept_of([4], [5, 9]))


def test_temperature_divides_the_logits():
    logits, tokens = random_logits(4), torch.tensor([1, 2, 3, 4])
    temperature = torch.tensor([0.6, 1.0, 1.3, 2.0])
    expected = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=1)[torch.arange(4), tokens]
    got = token_logprobs(logits, tokens, temperature, None)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_log_probabilities_are_never_above_zero_and_always_finite():
    logits = torch.zeros(64, 50_000)
    logits[:, 7] = torch.linspace(0, 200, 64)
    for token in (7, 8):
        for kept in (None, kept_of(*[[7, 8]] * 64), kept_of(*[[token]] * 64)):
            got = token_logprobs(logits, torch.full((64,), token), ones(64), kept)
            assert bool((got <= 0).all())
            assert bool(got.isfinite().all())


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32"):
        token_logprobs(random_logits(1).bfloat16(), torch.tensor([1]), ones(1), None)


def test_a_bf16_head_gives_the_log_softmax_of_its_logits_in_float32():
    model = LanguageModel(random_model().bfloat16())
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(8)
    expected = torch.log_softmax(model.logits(hidden).double(), dim=1)[torch.arange(8), tokens]
    with torch.no_grad():
        together = head_logprobs(model, hidden, tokens, ones(8), None)
        alone = torch.cat([head_logprobs(model, hidden[i : i + 1], tokens[i : i + 1], ones(1), None) for i in range(8)])
    torch.testing.assert_close(together.double(), expected.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(together, alone, atol=0.05, rtol=0)  # a product of one row may round bf16 logits apart
    assert bool((together <= 0).all())


@pytest.mark.parametrize("kept", [None, kept_of([], [1, 2, 60], [2], [], [4, 8], [5], [])], ids=["full", "kept"])
def test_blocks_change_neither_values_nor_gradients(kept):
    model = LanguageModel(random_model())
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    tokens, temperature = torch.arange(7), torch.linspace(0.5, 1.5, 7)

    def run(block_bytes):
        hidden.grad = None
        got = head_logprobs(model, hidden, tokens, temperature, kept, block_bytes=block_bytes)
        (got * torch.arange(1.0, 8.0)).sum().backward()
        assert hidden.grad is not None
        return got.detach(), hidden.grad

    whole = run(logprobs.BLOCK_BYTES)
    for rows in (2, 4):  # the logits of four blocks are computed again, those of two are kept
        for left, right in zip(whole, run(rows * VOCAB * 4), strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    assert bool((whole[1].abs().sum(dim=1) > 0)[[0, 1, 3, 4, 6]].all())
    assert head_logprobs(model, hidden[:0], tokens[:0], temperature[:0], None).shape == (0,)


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 12, 600]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)


def plain_distribution(logits, params):
    """The definition, token by token, in float64."""
    probs = torch.softmax(logits.double() / params.temperature, dim=0).tolist()
    kept = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = kept[: params.top_k or len(kept)]
    if params.top_p < 1:
        total, mass, survivors = sum(probs[token] for token in kept), 0.0, []
        for token in kept:
            if mass < params.top_p * total:
                survivors.append(token)
            mass += probs[token]
        kept = survivors
    kept = [token for token in kept if probs[token] >= params.min_p * probs[kept[0]]]
    total = sum(probs[token] for token in kept)
    return {token: probs[token] / total for token in kept}


@settings(deadline=None, max_examples=60)
@given(st.lists(SAMPLING, min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([17, 700]))
def test_the_distribution_is_the_one_defined(params, seed, vocab):
    """A vocabulary of 700 is larger than what is ordered at first."""
    logits = random_logits(len(params), vocab=vocab, seed=seed, scale=2.0)
    drawn = sampling_distribution(logits, params)
    for row, own in enumerate(params):
        expected = plain_distribution(logits[row], own)
        got = {token: p for token, p in enumerate(drawn.probs[row].tolist()) if p > 0}
        assert got == pytest.approx(expected, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(SAMPLING, min_size=1, max_size=5), st.integers(0, 2**31))
def test_recorded_log_probabilities_are_those_drawn_from(params, seed):
    logits = random_logits(len(params), seed=seed)
    drawn = sampling_distribution(logits, params)
    tokens = torch.multinomial(drawn.probs, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
    kept = kept_sets(drawn.kept) if drawn.kept is not None else None
    temperature = torch.tensor([own.temperature for own in params])
    got = token_logprobs(logits, tokens, temperature, kept)
    expected = drawn.probs.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_rows_without_truncation_are_full():
    logits = random_logits(3)
    plain, cut = SamplingParams(temperature=0.7), SamplingParams(top_k=2)
    assert sampling_distribution(logits, [plain] * 3).kept is None
    drawn = sampling_distribution(logits, [plain, cut, plain])
    assert drawn.kept is not None
    kept = kept_sets(drawn.kept)
    assert kept.of(0) is None
    assert kept.of(2) is None
    assert kept.of(1).tolist() == sorted(logits[1].topk(2).indices.tolist())


def test_of_equally_likely_tokens_exactly_k_are_kept():
    drawn = sampling_distribution(torch.zeros(1, 6), [SamplingParams(top_k=2)])
    assert drawn.kept is not None
    assert drawn.kept.sum() == 2
    assert sorted(drawn.probs[0].tolist()) == [0, 0, 0, 0, 0.5, 0.5]
