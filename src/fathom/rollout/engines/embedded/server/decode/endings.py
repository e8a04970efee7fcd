"""Does a sequence end with the token just sampled, and why? The one place that knows.

Letters: B rows of a step.
"""

from __future__ import annotations

from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import FinishReason
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable


@final
class Endings:
    """What ends each sequence of a slot table."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._table = table
        self._stops = np.zeros((len(table.active), vocab_size), np.bool_)

    def open(self, slot: int, request: GenerateRequest) -> None:
        """A sequence has got this slot."""
        self._stops[slot] = False
        self._stops[slot, list(request.stop_ids)] = True

    def ended(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: nothing comes after the last token of these rows."""
        return self._stopped(rows) | self._table.full(rows)

    def reason(self, slot: int, max_new_tokens: int) -> FinishReason:
        """Why a row that has ended did so."""
        if self._stopped(np.array([slot]))[0]:
            return FinishReason.STOP
        sampled = int(self._table.length[slot] - self._table.prompt[slot])
        return FinishReason.LENGTH if sampled >= max_new_tokens else FinishReason.CONTEXT

    def _stopped(self, rows: np.ndarray) -> np.ndarray:
        return self._stops[rows, self._table.tokens[rows, self._table.length[rows] - 1]]
