"""The engine's draw: its bits, its distribution, and what it does with rows that are no distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.records.bias import LogitBias, TokenBias
from fathom.core.records.sampling import SamplingParams
from fathom.model.logprobs import token_logprobs
from fathom.rollout.engines.embedded.server.decode.sampler import Draw, draw
from fathom.rollout.engines.uniforms import uniforms

torch.set_num_threads(1)

BIASES = (None, LogitBias(ids=(0,), values=(2.0,)), LogitBias(ids=(1, 5, 16), values=(-100.0, 3.5, 0.25)))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 20, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    logit_bias=st.sampled_from(BIASES),
)


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(drawn: Draw, index: int) -> tuple[int, bytes, list[int] | None, bytes]:
    """All of a row, in bits."""
    kept = drawn.kept.of(index) if drawn.kept is not None else None
    assert drawn.raw_logprobs is not None
    return (
        int(drawn.token_ids[index]),
        drawn.logprobs[index].tobytes(),
        None if kept is None else kept.tolist(),
        drawn.raw_logprobs[index].tobytes(),
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(SAMPLING, min_size=2, max_size=9),
    st.integers(0, 2**31),
    st.sampled_from([17, 128, 1000, 4096]),
    st.sampled_from([0.2, 3.0, 8.0]),
)
def test_a_row_is_the_same_to_the_bit_in_any_batch(
    params: list[SamplingParams], seed: int, vocab: int, scale: float
) -> None:
    logits, numbers = random_logits(len(params), vocab, seed, scale), np.random.default_rng(seed).random(len(params))
    together = draw(logits, params, numbers, raw=True)
    shuffled = np.random.default_rng(seed).permutation(len(params))
    for chosen in ([0], [1, 0], shuffled.tolist(), shuffled[: len(params) // 2].tolist()):
        part = draw(logits[chosen], [params[index] for index in chosen], numbers[chosen], raw=True)
        for place, index in enumerate(chosen):
            assert row(part, place) == row(together, index)


@settings(deadline=None, max_examples=60)
@given(st.lists(SAMPLING, min_size=1, max_size=9), st.integers(0, 2**31), st.sampled_from([17, 1000, 4096]))
def test_the_trainer_finds_the_same_log_probability_to_the_bit(
    params: list[SamplingParams], seed: int, vocab: int
) -> None:
    """With all rows in another order, among rows of others."""
    logits = random_logits(len(params), vocab, seed)
    drawn = draw(logits, params, np.random.default_rng(seed).random(len(params)), raw=False)
    order = np.random.default_rng(seed + 1).permutation(np.repeat(np.arange(len(params)), 2))
    bias = TokenBias.of([own.logit_bias for own in params])
    found = token_logprobs(
        logits[order],
        torch.from_numpy(drawn.token_ids[order]),
        torch.tensor([params[index].temperature for index in order]),
        drawn.kept.select(order) if drawn.kept is not None else None,
        bias.select(order) if bias is not None else None,
    )
    np.testing.assert_array_equal(found.numpy(), drawn.logprobs[order])


@pytest.mark.parametrize("vocab", [49_152, 50_257, 151_936])
def test_bits_are_kept_in_vocabularies_of_real_models(vocab: int) -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=20),
        SamplingParams(min_p=0.05, logit_bias=BIASES[2]),
        SamplingParams(temperature=1.2, top_k=2000, top_p=0.95),
    ] * 4
    logits, numbers = random_logits(len(params), vocab, 0), np.random.default_rng(0).random(len(params))
    together = draw(logits, params, numbers, raw=True)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for chosen in ([3], [2, 7, 0], list(range(len(params)))[::-1]):
            part = draw(logits[chosen], [params[index] for index in chosen], numbers[chosen], raw=True)
            for place, index in enumerate(chosen):
                assert row(part, place) == row(together, index)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, logit_bias=BIASES[2]),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, logit_bias=BIASES[2]),
        SamplingParams(top_p=0.8, min_p=0.02, logit_bias=BIASES[1]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: SamplingParams) -> None:
    """Chi-square over the random numbers of requests of a group: one draw for each seed."""
    logits, count = random_logits(1, 150, 3, scale=1.5), 4000
    drawn = draw(
        logits.expand(count, 150), [sampling] * count, uniforms(np.arange(count), np.full(count, 9)), raw=False
    )
    tokens, times = np.unique(drawn.token_ids, return_counts=True)
    first = {token: float(drawn.logprobs[np.argmax(drawn.token_ids == token)]) for token in tokens.tolist()}
    expected = count * np.exp([first[token] for token in tokens.tolist()])
    common = expected >= 5
    rest_seen, rest_due = count - times[common].sum(), count - expected[common].sum()
    statistic = float((((times - expected) ** 2 / expected)[common]).sum()) + (rest_seen - rest_due) ** 2 / max(
        rest_due, 5.0
    )
    freedom = int(common.sum())
    assert freedom > 3
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_members_of_a_group_are_never_clones() -> None:
    """64 seeds, 24 tokens each: no two sequences share even their first eight tokens by chance of this size."""
    logits, seeds = random_logits(1, 1000, 1, scale=1.0), np.arange(64)
    texts = [
        draw(logits.expand(64, 1000), [SamplingParams()] * 64, uniforms(seeds, np.full(64, place)), raw=False).token_ids
        for place in range(24)
    ]
    assert len({tuple(text[:8]) for text in np.stack(texts, axis=1).tolist()}) == 64


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3)])
def test_a_row_that_diverged_shows_in_its_log_probability_alone(sampling: SamplingParams, wrong: float) -> None:
    logits, numbers = random_logits(3, 300, 0), np.array([0.2, 0.5, 0.9])
    healthy = draw(logits, [sampling] * 3, numbers, raw=True)
    spoilt = logits.clone()
    spoilt[1, 7] = wrong
    drawn = draw(spoilt, [sampling] * 3, numbers, raw=True)
    assert not np.isfinite(drawn.logprobs[1])
    assert 0 <= drawn.token_ids[1] < 300
    assert [row(drawn, index) for index in (0, 2)] == [row(healthy, index) for index in (0, 2)]


def test_a_bias_moves_the_logits_before_the_temperature() -> None:
    """At temperature 0.5 a bias of log 2 makes a token four times as likely."""
    sampling = SamplingParams(temperature=0.5, logit_bias=LogitBias(ids=(2,), values=(math.log(2),)))
    drawn = draw(torch.zeros(1, 4), [sampling], np.array([0.5]), raw=True)
    assert drawn.token_ids.tolist() == [2]
    assert drawn.logprobs[0] == pytest.approx(math.log(4 / 7), abs=1e-6)
    assert drawn.raw_logprobs is not None
    assert drawn.raw_logprobs[0] == pytest.approx(math.log(1 / 4), abs=1e-6)
