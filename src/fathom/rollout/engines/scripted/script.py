"""What a scripted engine says.

Letters: T tokens of a context, N scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, final

import numpy as np

from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import GenerateRequest, ScoreRequest
from fathom.core.records.bias import LogitBias
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.rollout.engines.uniforms import uniforms

_FULL = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled token."""

    id: int
    """The token."""
    logprob: float
    """Under the distribution sampled from."""
    raw_logprob: float
    """At temperature 1 over the full vocabulary."""
    kept: np.ndarray = field(default_factory=lambda: _FULL)
    """int32: its kept set, ascending. Empty: full."""


class Script(Protocol):
    """Decides every token."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def knows_distributions(self) -> bool:
        """It can say how likely every id is."""
        ...

    def next_token(self, request: GenerateRequest, context: np.ndarray, version: PolicyVersion) -> Token | FinishReason:
        """The token that follows int32 [T] `context` (prompt and sampled); or why there is none."""
        ...

    def score(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """float32 [N]: log-probabilities of given tokens."""
        ...

    def distributions(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """float32 [N, V]: log-probabilities of all ids at the scored positions, -inf outside a kept set. Only where
        `knows_distributions`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A fixed answer."""

    token_ids: tuple[int, ...]
    """The tokens. The request's stop ids and limits may end it earlier."""
    logprobs: tuple[float, ...] | None = None
    """Of each token. None: `Replies.LOGPROB` for all."""
    finish: FinishReason = FinishReason.STOP
    """Why it ends when its tokens are used up and nothing else ended it."""


@final
class Replies:
    """Fixed answers by request, e.g. `Replies.table({(1, 2, 3): Reply(token_ids=(7, 8))})`. Same under any version."""

    LOGPROB = -1.0
    knows_distributions = False

    def __init__(self, choose: Callable[[GenerateRequest], Reply]) -> None:
        """`choose` says what a request gets."""
        self.vocab_size = 2**31
        self._choose = choose

    @classmethod
    def table(cls, replies: Mapping[tuple[int, ...], Reply]) -> Self:
        """By prompt ids. A prompt that is not listed raises KeyError."""
        return cls(lambda request: replies[tuple(request.prompt_ids.tolist())])

    def next_token(self, request: GenerateRequest, context: np.ndarray, version: PolicyVersion) -> Token | FinishReason:
        """See `Script.next_token`."""
        reply, sampled = self._choose(request), len(context) - len(request.prompt_ids)
        if sampled >= len(reply.token_ids):
            return reply.finish
        token_id = reply.token_ids[sampled]
        logprob = self.LOGPROB if reply.logprobs is None else reply.logprobs[sampled]
        kept = np.array([token_id], np.int32) if request.sampling.truncates else _FULL
        return Token(id=token_id, logprob=logprob, raw_logprob=logprob, kept=kept)

    def score(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """See `Script.score`. The same constant everywhere."""
        return np.full(len(request.positions), self.LOGPROB, np.float32)

    def distributions(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """Never asked for: only answers are known."""
        raise AssertionError("fixed answers have no distributions")


@final
class ToyPolicy:
    """A random bigram model, another one for each version: every number that it reports is exact."""

    knows_distributions = True

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        """`seed` fixes all of it."""
        self.vocab_size = vocab_size
        self._seed = seed

    def next_token(self, request: GenerateRequest, context: np.ndarray, version: PolicyVersion) -> Token:
        """See `Script.next_token`."""
        logits = self._logits(int(context[-1]), version)
        logprobs, kept = distribution(logits, request.sampling)
        draw = uniforms(np.array([request.seed], np.uint64), np.array([len(context)], np.int64))[0]
        cumulative = np.cumsum(np.exp(logprobs))
        token_id = int(np.searchsorted(cumulative, min(draw * cumulative[-1], cumulative[-1] * (1 - 1e-15)), "right"))
        raw, _ = distribution(logits, SamplingParams())
        return Token(id=token_id, logprob=float(logprobs[token_id]), raw_logprob=float(raw[token_id]), kept=kept)

    def score(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """See `Script.score`."""
        scored: list[float] = []
        for index, position in enumerate(request.positions.tolist()):
            logits, total = self._at(request, index, version)
            scored.append(float(logits[request.token_ids[position]] - total))
        return np.minimum(np.array(scored, np.float32), 0)

    def distributions(self, request: ScoreRequest, version: PolicyVersion) -> np.ndarray:
        """See `Script.distributions`."""
        rows = np.full((len(request.positions), self.vocab_size), -np.inf, np.float32)
        for index in range(len(request.positions)):
            logits, total = self._at(request, index, version)
            kept = request.kept.of(index) if request.kept is not None else None
            places = slice(None) if kept is None else kept
            rows[index, places] = np.minimum((logits - total)[places], 0)
        return rows

    def _at(self, request: ScoreRequest, index: int, version: PolicyVersion) -> tuple[np.ndarray, float]:
        """float64 [V] scaled logits at a scored position, and the log of the mass of its kept set."""
        logits = self._logits(int(request.token_ids[request.positions[index] - 1]), version)
        if request.bias is not None and request.bias.which[index] >= 0:
            logits = biased(logits, request.bias.biases[request.bias.which[index]])
        logits = logits / request.temperature[index]
        kept = request.kept.of(index) if request.kept is not None else None
        return logits, _logsumexp(logits if kept is None else logits[kept])

    def _logits(self, last: int, version: PolicyVersion) -> np.ndarray:
        row = np.full(self.vocab_size, self._seed + (last << 20) + (version.number << 40), np.uint64)
        return 6.0 * uniforms(row, np.arange(self.vocab_size))


def distribution(logits: np.ndarray, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """What is sampled from: float64 [V] log-probabilities (-inf where removed), and the kept ids (empty: full)."""
    scaled = biased(logits, sampling.logit_bias) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = np.zeros(len(scaled), bool)
    kept[order[: sampling.top_k or len(scaled)]] = True
    probs = np.where(kept, np.exp(scaled - _logsumexp(scaled[kept])), 0.0)[order]
    if sampling.top_p < 1:
        kept[order[np.cumsum(probs) - probs >= sampling.top_p]] = False
    kept[order[probs < sampling.min_p * probs[0]]] = False
    logprobs = np.where(kept, scaled - _logsumexp(scaled[kept]), -np.inf)
    return logprobs, _FULL if kept.all() else np.flatnonzero(kept).astype(np.int32)


def biased(logits: np.ndarray, bias: LogitBias | None) -> np.ndarray:
    """float64 [V]: the logits with a bias."""
    if bias is None:
        return logits
    added = logits.copy()
    added[list(bias.ids)] += np.array(bias.values, np.float32)
    return added


def _logsumexp(values: np.ndarray) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))
