"""A forward without a model: to test everything around it exactly, and to measure what that costs.

Its KV is a number per token, its logits a hash of all numbers in a sequence's pages: right only if the pages are. A
page that is lost, mixed up, or older than the records say changes every token after it.

Letters: B sequences, P pages of the longest sequence, N positions, V vocabulary.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.core.ports.engine import ScoreRequest
from fathom.model.id_logprobs import id_logprobs, likeliest
from fathom.rollout.engines.embedded.server.decode.forward import Batch, Scores
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet
from fathom.rollout.engines.uniforms import uniforms

_SPREAD = 4.0
"""Logits lie in [0, _SPREAD)."""


@final
class ScriptedForward:
    """See `Forward`. Counts what it computes."""

    def __init__(self, *, pages: int, page_tokens: int, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.dtype = "float32"
        self.kernels = "scripted"
        self.has_experts = True
        self.computed = 0
        """Tokens computed so far."""
        self._page_tokens = page_tokens
        self._numbers = np.zeros((pages, page_tokens), np.float64)
        self._versions = np.zeros((pages, page_tokens), np.int64)
        self._routes = np.zeros((pages, page_tokens, 1, 3), np.uint8)

    def use(self, weights: WeightSet) -> None:
        """See `Forward.use`."""

    def logits(self, weights: WeightSet, batch: Batch) -> Tensor:
        """See `Forward.logits`."""
        self.computed += len(batch.tokens)
        rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        pages, offsets = batch.tables[rows, batch.positions // self._page_tokens], batch.positions % self._page_tokens
        self._numbers[pages, offsets] = _numbers(batch.tokens, batch.positions)
        self._versions[pages, offsets] = weights.number
        if batch.routed:
            self._routes[pages, offsets] = scripted_routes(batch.tokens, batch.positions, weights.number)
        chosen = rows[batch.sampled]
        held = np.arange(batch.tables.shape[1] * self._page_tokens) <= batch.positions[batch.sampled][:, None]
        numbers = self._numbers[batch.tables[chosen]].reshape(held.shape)
        versions = self._versions[batch.tables[chosen]].reshape(held.shape)
        sums = np.where(held, numbers, 0.0).sum(axis=1)
        oldest = np.where(held, versions, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
        return torch.from_numpy(_logits(sums, weights.number, oldest, self.vocab_size))

    def copy_page(self, from_page: int, to_page: int) -> None:
        """See `Forward.copy_page`."""
        for each in (self._numbers, self._versions, self._routes):
            each[to_page] = each[from_page]

    def routes(self, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """See `Forward.routes`."""
        return self._routes[pages, offsets]

    def score(self, weights: WeightSet, request: ScoreRequest) -> Scores:
        """See `Forward.score`: of logits whose whole context has the version that scores."""
        contexts = [request.token_ids[:position] for position in request.positions.tolist()]
        rows = [scripted_logits(context, weights.number, weights.number, self.vocab_size) for context in contexts]
        scaled = torch.from_numpy(np.array(rows)) / torch.from_numpy(request.temperature).unsqueeze(1)
        targets = torch.from_numpy(request.token_ids[request.positions].astype(np.int64)).unsqueeze(1)
        return Scores(
            logprobs=scaled.log_softmax(dim=1).gather(1, targets).squeeze(1).numpy(),
            top=likeliest(scaled, None, request.top) if request.top else None,
            others=None if request.others is None else id_logprobs(scaled, None, request.others).numpy(),
        )


def scripted_logits(context: np.ndarray, version: int, oldest: int, vocab_size: int = 64) -> np.ndarray:
    """float32 [V] after int32 `context`, by weights `version`, where `oldest` is the oldest version behind the KV."""
    numbers = _numbers(context, np.arange(len(context)))
    return _logits(np.array([numbers.sum()]), version, np.array([oldest]), vocab_size)[0]


def scripted_routes(tokens: np.ndarray, positions: np.ndarray, version: int) -> np.ndarray:
    """uint8 [n, 1, 3]: three experts that tell token, position and version."""
    told = np.stack((tokens, positions + 64, np.full(len(tokens), version + 192)), axis=1)
    return told[:, None].astype(np.uint8)


def _numbers(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64: whole numbers below 2**32, so that their sums are exact in any order."""
    return np.floor(uniforms(tokens, positions) * 2.0**32)


def _logits(sums: np.ndarray, version: int, oldest: np.ndarray, vocab_size: int) -> np.ndarray:
    seeds = sums.astype(np.uint64) * np.uint64(1009) + (oldest * 101 + version).astype(np.uint64)
    vocabulary = np.tile(np.arange(vocab_size), len(seeds))
    drawn = uniforms(np.repeat(seeds, vocab_size), vocabulary)
    return (drawn.reshape(len(seeds), vocab_size) * _SPREAD).astype(np.float32)
