"""How many tokens to draft for whom, and what became of them.

Letters: B rows of a step.
"""

from __future__ import annotations

from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest
from fathom.rollout.engines.embedded.server.decode.draft.proposer import Proposer
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable

_STEP_TOKENS = 32
"""A step is filled up with drafts to this many tokens. One that is larger anyway keeps the cores busy by itself."""
_MEMORY = 0.75
"""Weight of the past in the running share of drafts that were right."""
_HOPELESS = 0.1
"""A sequence with a smaller share rests;"""
_REST = 0.001
"""each step gives it back this much, so that it is tried again."""


@final
class Speculation:
    """Drafts lie in the slot table after the last token, as KV not yet accepted lies in the pages after the rest."""

    def __init__(self, table: SlotTable, proposer: Proposer, draft_tokens: int, step_tokens: int) -> None:
        """At most `draft_tokens` drafts in a row for each sequence; `step_tokens` in one forward at most."""
        self._table = table
        self._proposer = proposer
        self._draft_tokens = draft_tokens
        self._step_tokens = min(step_tokens, _STEP_TOKENS)
        self._share = np.ones(len(table.active))
        """Running share, per slot, of drafts that were right."""

    def open(self, slot: int, request: GenerateRequest) -> None:
        """A new sequence has this slot."""
        self._share[slot] = 1.0
        self._proposer.open(slot, request)

    def wanted(self, rows: np.ndarray, planned: int) -> np.ndarray:
        """int64 [B]: drafts worth computing of rows that decode, the first rows first, `planned` tokens being due."""
        share, table = self._share[rows], self._table
        wanted = np.where(share < _HOPELESS, 0, np.ceil(share * self._draft_tokens)).astype(np.int64)
        # A step gives one token more than it confirms, and there must be a place for it.
        wanted = np.minimum(wanted, table.limit[rows] - table.length[rows] - 1)
        room = max(0, self._step_tokens - planned)
        return np.clip(room - (np.cumsum(wanted) - wanted), 0, wanted)

    def draft(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        """int64 [B]: how many tokens were drafted, at most `most`, and written after the last token of each row."""
        counts = np.zeros(len(rows), np.int64)
        asked = np.flatnonzero(most)
        if not len(asked):
            return counts
        slots = rows[asked].tolist()
        contexts = [self._table.context(slot) for slot in slots]
        drafts = self._proposer.propose(slots, contexts, most[asked].tolist())
        for index, slot, tokens in zip(asked.tolist(), slots, drafts, strict=True):
            length = self._table.length[slot]
            self._table.tokens[slot, length : length + len(tokens)] = tokens
            counts[index] = len(tokens)
        return counts

    def settle(self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """So many tokens of these rows were drafted, int64 [B], and so many of them accepted."""
        self._table.drafted[rows] += drafted
        self._table.accepted[rows] += accepted
        share = self._share[rows]
        seen = _MEMORY * share + (1 - _MEMORY) * accepted / np.maximum(drafted, 1)
        self._share[rows] = np.where(drafted > 0, seen, np.minimum(share + _REST, 1.0))
