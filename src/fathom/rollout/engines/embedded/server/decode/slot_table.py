"""The books of running sequences: one row per slot of the KV cache, one numpy column per fact.

A step touches all its rows at once; Python sees a single sequence only when it starts, is sent, or ends.
Letters: B rows of a step, M longest context.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest


@final
class SlotTable:
    """Columns are indexed by slot. A row is valid while `active`."""

    def __init__(self, slots: int, max_tokens: int, vocab_size: int) -> None:
        """`slots` sequences of at most `max_tokens` tokens."""
        self.active = np.zeros(slots, np.bool_)
        self.prompt = np.zeros(slots, np.int64)
        """Prompt tokens."""
        self.length = np.zeros(slots, np.int64)
        """Tokens of the context so far."""
        self.computed = np.zeros(slots, np.int64)
        """Leading tokens whose KV is in the cache. One less than `length`: ready to decode."""
        self.sent = np.zeros(slots, np.int64)
        """Tokens of the context that the caller has."""
        self.limit = np.zeros(slots, np.int64)
        """Length at which the sequence ends."""
        self.kv_oldest = np.zeros(slots, np.int32)
        """Oldest version number behind the KV in the cache."""
        self.seed = np.zeros(slots, np.uint64)
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        self.logprobs = np.zeros((slots, max_tokens), np.float32)
        self.raw_logprobs = np.zeros((slots, max_tokens), np.float32)
        self.policy_version = np.zeros((slots, max_tokens), np.int32)
        self.kv_version = np.zeros((slots, max_tokens), np.int32)
        self._stops = np.zeros((slots, vocab_size), np.bool_)
        self._max_tokens = max_tokens

    @property
    def free(self) -> int:
        """Slots without a sequence."""
        return len(self.active) - int(self.active.sum())

    def choose(self, precious: Container[int]) -> int:
        """The lowest free slot, one that is not `precious` where there is one: neighbouring slots decode fastest."""
        free = np.flatnonzero(~self.active).tolist()
        return next((slot for slot in free if slot not in precious), free[0])

    def open(self, slot: int, request: GenerateRequest) -> None:
        """Give a sequence a free slot; nothing of it is computed yet."""
        size = len(request.prompt_ids)
        self.active[slot] = True
        self.prompt[slot] = self.length[slot] = self.sent[slot] = size
        self.computed[slot] = 0
        self.limit[slot] = min(size + request.max_new_tokens, self._max_tokens)
        self.seed[slot] = request.seed
        self.tokens[slot, :size] = request.prompt_ids
        self._stops[slot] = False
        self._stops[slot, list(request.stop_ids)] = True

    def close(self, slot: int) -> None:
        """The sequence has ended; its KV stays readable until the slot is opened again."""
        self.active[slot] = False

    def to_prefill(self) -> np.ndarray:
        """int64 [B]: rows whose context is not in the cache."""
        return np.flatnonzero(self.active & (self.computed < np.maximum(self.length - 1, 1)))

    def to_decode(self) -> np.ndarray:
        """int64 [B]: rows that need one forward of their last token."""
        return np.flatnonzero(self.active & (self.computed == self.length - 1) & (self.computed > 0))

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one sampled token per row: int64 ids [B], float32 log-probabilities [B], made by `version`."""
        at = self.length[rows]
        self.kv_oldest[rows] = np.minimum(self.kv_oldest[rows], version)
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.policy_version[rows, at] = version
        self.kv_version[rows, at] = self.kv_oldest[rows]
        self.computed[rows] = at
        self.length[rows] = at + 1

    def stopped(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: the last token is one of the row's stop ids."""
        return self._stops[rows, self.tokens[rows, self.length[rows] - 1]]

    def full(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: nothing more may be sampled."""
        return self.length[rows] >= self.limit[rows]
