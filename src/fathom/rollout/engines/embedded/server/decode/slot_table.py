"""The books of running sequences: one row per slot, one numpy column per fact.

A step touches all its rows at once; Python sees a single sequence only when it starts, is sent, or ends.
Letters: B rows of a step.
"""

from __future__ import annotations

from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest


@final
class SlotTable:
    """Columns are indexed by slot. A row is valid while `active`."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        """`slots` sequences of at most `max_tokens` tokens."""
        self.active = np.zeros(slots, np.bool_)
        self.pinned = np.zeros(slots, np.bool_)
        """Served by a version of its own, not by whatever is live."""
        self.priority = np.zeros(slots, np.int64)
        self.started = np.zeros(slots, np.int64)
        """Order in which sequences got their slots."""
        self.prompt = np.zeros(slots, np.int64)
        """Prompt tokens."""
        self.length = np.zeros(slots, np.int64)
        """Tokens of the context so far."""
        self.computed = np.zeros(slots, np.int64)
        """Leading tokens whose KV is in the slot's pages. Equal to `length` only until the next token is sampled."""
        self.sent = np.zeros(slots, np.int64)
        """Tokens of the context that the caller has."""
        self.limit = np.zeros(slots, np.int64)
        """Length at which the sequence ends."""
        self.kv_oldest = np.zeros(slots, np.int32)
        """Oldest version number behind the KV."""
        self.drafted = np.zeros(slots, np.int64)
        """Tokens that were drafted and computed,"""
        self.accepted = np.zeros(slots, np.int64)
        """and those of them after which the same forward gave one token more."""
        self.seed = np.zeros(slots, np.uint64)
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        """During a step, drafts lie after the first `length`."""
        self.logprobs = np.zeros((slots, max_tokens), np.float32)
        self.raw_logprobs = np.zeros((slots, max_tokens), np.float32)
        self.policy_version = np.zeros((slots, max_tokens), np.int32)
        self.kv_version = np.zeros((slots, max_tokens), np.int32)
        self._max_tokens = max_tokens
        self._starts = 0

    @property
    def free(self) -> int:
        """Slots without a sequence."""
        return len(self.active) - int(self.active.sum())

    def open(self, request: GenerateRequest) -> int:
        """Give a sequence the lowest free slot; nothing of it is computed yet."""
        slot, size = int(np.argmin(self.active)), len(request.prompt_ids)
        self.active[slot] = True
        self.pinned[slot] = request.pinned is not None
        self.priority[slot], self.started[slot] = request.priority, self._starts
        self._starts += 1
        self.prompt[slot] = self.length[slot] = self.sent[slot] = size
        self.computed[slot] = self.drafted[slot] = self.accepted[slot] = 0
        self.limit[slot] = min(size + request.max_new_tokens, self._max_tokens)
        self.seed[slot] = request.seed
        self.tokens[slot, :size] = request.prompt_ids
        return slot

    def close(self, slot: int) -> None:
        """The sequence has ended; its row stays readable until the slot is opened again."""
        self.active[slot] = False

    def ranked(self) -> np.ndarray:
        """int64 [B]: active rows, first served first: smallest priority, then order of arrival."""
        rows = np.flatnonzero(self.active)
        return rows[np.lexsort((self.started[rows], self.priority[rows]))]

    def sampled(self, slot: int) -> int:
        """Tokens sampled of a row so far."""
        return int(self.length[slot] - self.prompt[slot])

    def context(self, slot: int) -> np.ndarray:
        """int32: the tokens of a row so far."""
        return self.tokens[slot, : self.length[slot]]

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one sampled token per row: int64 ids [B], float32 log-probabilities [B], made by `version`."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.policy_version[rows, at] = version
        self.kv_version[rows, at] = self.kv_oldest[rows]
        self.length[rows] = at + 1

    def full(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: nothing more may be sampled."""
        return self.length[rows] >= self.limit[rows]
