"""What is sampled, and whether the numbers reported are those of the distribution sampled from."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import msgspec
import numpy as np

from fathom.core.ports.engine import ScoreRequest
from fathom.core.records.bias import LogitBias, TokenBias
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.conformance.subject import PROMPT, Case, Generated, Subject

_TRUNCATIONS = (
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
)
_BIAS = LogitBias(ids=(1, 3, 8), values=(-100.0, 1.5, 0.75))
_BIASED = (
    SamplingParams(logit_bias=_BIAS),
    SamplingParams(temperature=0.6, logit_bias=_BIAS),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, logit_bias=_BIAS),
)
_GROUP, _LEAST_DUE, _DEVIATIONS = 300, 5, 5
"""Requests of the chi-square test, the fewest of a token it looks at alone, and how many deviations it may be off."""


async def the_seed_decides(subject: Subject) -> None:
    """Same seed, same tokens, whatever else runs; different seeds, different tokens."""
    await subject.serve()
    alone = await subject.run(subject.request(seed=11))
    among = await asyncio.gather(*(subject.run(subject.request(seed=seed)) for seed in range(8, 16)))
    assert among[3].text == alone.text
    np.testing.assert_allclose(among[3].logprobs, alone.logprobs, atol=subject.tolerance)
    assert len({tuple(done.text) for done in among}) == len(among), "members of a group are clones"


async def positions_have_their_own_randomness(subject: Subject) -> None:
    """The largest seed works, and continuing a text does not repeat its random numbers."""
    await subject.serve()
    first = await subject.run(subject.request(seed=2**64 - 1, new=16))
    then = await subject.run(subject.request(prompt=tuple(first.context.tolist()), seed=2**64 - 1, new=16))
    whole = await subject.run(subject.request(seed=2**64 - 1, new=32))
    assert first.text + then.text == whole.text


async def logprobs_are_those_of_score(subject: Subject) -> None:
    """Teacher-forced scoring finds the log-probability of every sampled token, at several temperatures."""
    await subject.serve()
    for temperature in (1.0, 0.6, 1.3):
        done = await subject.run(subject.request(sampling=SamplingParams(temperature=temperature), seed=1))
        assert all(chunk.kept is None for chunk in done.chunks)
        np.testing.assert_allclose(await _scores(subject, done, None), done.logprobs, atol=subject.tolerance)


async def kept_sets_are_those_sampled_from(subject: Subject) -> None:
    """The sampled token is in its kept set, and its log-probability is renormalised over it."""
    await subject.serve()
    for sampling in _TRUNCATIONS:
        done = await subject.run(subject.request(sampling=sampling, seed=2))
        kept = done.kept
        assert kept is not None
        assert len(kept.offsets) == len(done.text) + 1
        for index, token in enumerate(done.text):
            ids = kept.of(index)
            if ids is not None:
                assert token in ids
                assert np.all(np.diff(ids) > 0)
                assert len(ids) <= (sampling.top_k or subject.vocab_size)
        np.testing.assert_allclose(await _scores(subject, done, kept), done.logprobs, atol=subject.tolerance)
        full = await _scores(subject, done, None)
        assert np.all(full <= done.logprobs + subject.tolerance), "removing tokens makes the others likelier"
        assert np.any(full < done.logprobs - subject.tolerance), f"{sampling} removed nothing"


async def one_kept_token_has_probability_one(subject: Subject) -> None:
    """top_k = 1 is the most likely token, with log-probability 0, whatever the seed."""
    await subject.serve()
    sampling = SamplingParams(top_k=1)
    one, other = [await subject.run(subject.request(sampling=sampling, seed=seed)) for seed in (1, 2)]
    assert one.text == other.text
    assert np.all(one.logprobs == 0)


async def mixed_batches_keep_their_own_parameters(subject: Subject) -> None:
    """Requests with different distributions, side by side, sample as they do alone."""
    await subject.serve()
    settings = (SamplingParams(), SamplingParams(temperature=0.6), *_TRUNCATIONS)
    together = await asyncio.gather(*(subject.run(subject.request(sampling=each, seed=9)) for each in settings))
    for sampling, done in zip(settings, together, strict=True):
        alone = await subject.run(subject.request(sampling=sampling, seed=9))
        assert done.text == alone.text
        assert (done.kept is not None) == sampling.truncates


async def a_bias_is_part_of_the_distribution(subject: Subject) -> None:
    """A biased token's log-probability is that of the biased logits, by `score` too; -100 bans a token."""
    if not subject.engine.capabilities.logit_bias:
        return
    await subject.serve()
    for sampling in _BIASED:
        done = await subject.run(subject.request(sampling=sampling, seed=4, new=48))
        assert _BIAS.ids[0] not in done.text
        np.testing.assert_allclose(await _scores(subject, done, done.kept), done.logprobs, atol=subject.tolerance)
        request = _score_request(subject, done, done.kept)
        without = await subject.engine.score(msgspec.structs.replace(request, bias=None))
        assert np.any(np.abs(without.logprobs - done.logprobs) > subject.tolerance), f"{sampling} changed nothing"


async def tokens_come_as_often_as_they_are_likely(subject: Subject) -> None:
    """Chi-square of the first tokens of a large group against the probabilities reported for them."""
    await subject.serve()
    biased = subject.engine.capabilities.logit_bias
    for sampling in (SamplingParams(temperature=0.8), _BIASED[2] if biased else _TRUNCATIONS[3]):
        group = await asyncio.gather(
            *(subject.run(subject.request(sampling=sampling, seed=seed, new=1)) for seed in range(_GROUP))
        )
        times = Counter(done.text[0] for done in group)
        likely = {done.text[0]: _GROUP * math.exp(done.logprobs[0]) for done in group}
        common = [token for token, due in likely.items() if due >= _LEAST_DUE]
        rest = _GROUP - sum(times[token] for token in common), _GROUP - sum(likely[token] for token in common)
        found = [(times[token], likely[token]) for token in common] + ([rest] if rest[1] >= _LEAST_DUE else [])
        chi_square = sum((seen - due) ** 2 / due for seen, due in found)
        assert len(found) > 1
        assert chi_square < len(found) + _DEVIATIONS * math.sqrt(2 * len(found)), f"{sampling}: {sorted(found)}"


async def raw_logprobs_are_untransformed(subject: Subject) -> None:
    """Raw log-probabilities are of temperature 1 over the full vocabulary."""
    if not subject.engine.capabilities.raw_logprobs:
        return
    await subject.serve()
    done = await subject.run(subject.request(sampling=SamplingParams(temperature=0.6, top_k=4), raw=True))
    raw = np.concatenate([chunk.raw_logprobs for chunk in done.chunks if chunk.raw_logprobs is not None])
    request = _score_request(subject, done, None)
    plain = await subject.engine.score(
        ScoreRequest(
            request_id=subject.name(),
            token_ids=request.token_ids,
            positions=request.positions,
            temperature=np.ones_like(request.temperature),
            kept=None,
            bias=None,
        )
    )
    np.testing.assert_allclose(raw, plain.logprobs, atol=subject.tolerance)
    assert done.chunks[0].raw_logprobs is not None


async def other_ids_are_scored(subject: Subject) -> None:
    """The likeliest ids of a position make up its distribution, over kept sets too; asking for ids by name gives the
    same numbers."""
    if not subject.engine.capabilities.ids_scored:
        return
    await subject.serve()
    for sampling in (SamplingParams(temperature=0.7), _TRUNCATIONS[3]):
        done = await subject.run(subject.request(sampling=sampling, seed=6))
        request = _score_request(subject, done, done.kept)
        whole = (await subject.engine.score(msgspec.structs.replace(request, top=subject.vocab_size))).top
        assert whole is not None
        mass = np.bincount(whole.lists.places, weights=np.exp(whole.logprobs))
        np.testing.assert_allclose(mass, np.ones(len(done.text)), atol=1e-4)
        sampled = whole.lists.ids == done.token_ids[whole.lists.places]
        np.testing.assert_allclose(whole.logprobs[sampled], done.logprobs, atol=subject.tolerance)
        again = msgspec.structs.replace(request, request_id=subject.name(), top=3, others=whole.lists)
        answer = await subject.engine.score(again)
        assert answer.others is not None
        np.testing.assert_allclose(answer.others, whole.logprobs, atol=subject.tolerance)
        assert answer.top is not None
        for place in range(len(done.text)):
            here = whole.logprobs[whole.lists.places == place]
            top = answer.top.logprobs[answer.top.lists.places == place]
            np.testing.assert_allclose(np.sort(top), np.sort(here)[-3:], atol=subject.tolerance)


async def a_shared_prompt_is_computed_once(subject: Subject) -> None:
    """A group after its first member reuses the prompt, says so, and samples what it would have sampled."""
    await subject.serve()
    prompt = PROMPT * 5
    first = await subject.run(subject.request(prompt=prompt, seed=0))
    group = await asyncio.gather(*(subject.run(subject.request(prompt=prompt, seed=seed)) for seed in range(4)))
    assert first.end.cached_tokens == 0
    assert max(done.end.cached_tokens for done in group) > 0
    assert group[0].text == first.text
    np.testing.assert_allclose(group[0].logprobs, first.logprobs, atol=subject.tolerance)


async def _scores(subject: Subject, done: Generated, kept: KeptSets | None) -> np.ndarray:
    result = await subject.engine.score(_score_request(subject, done, kept))
    assert result.version.number == done.policy_version[-1]
    assert result.logprobs.dtype == np.float32
    return result.logprobs


def _score_request(subject: Subject, done: Generated, kept: KeptSets | None) -> ScoreRequest:
    size = len(done.text)
    return ScoreRequest(
        request_id=subject.name(),
        token_ids=done.context,
        positions=np.arange(size, dtype=np.int64) + len(done.request.prompt_ids),
        temperature=np.full(size, done.request.sampling.temperature, np.float32),
        kept=kept,
        bias=TokenBias.of([done.request.sampling.logit_bias] * size),
    )


DISTRIBUTION_CASES: tuple[Case, ...] = (
    the_seed_decides,
    positions_have_their_own_randomness,
    logprobs_are_those_of_score,
    kept_sets_are_those_sampled_from,
    one_kept_token_has_probability_one,
    mixed_batches_keep_their_own_parameters,
    a_bias_is_part_of_the_distribution,
    tokens_come_as_often_as_they_are_likely,
    raw_logprobs_are_untransformed,
    other_ids_are_scored,
    a_shared_prompt_is_computed_once,
)
