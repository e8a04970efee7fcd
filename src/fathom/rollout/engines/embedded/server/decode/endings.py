"""Does a sequence end with the token just sampled, and why? The one place that knows.

Letters: B rows of a step.
"""

from __future__ import annotations

from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import FinishReason
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.stop_strings import Decode, StopMatcher


@final
class Endings:
    """What ends each sequence of a slot table."""

    def __init__(self, table: SlotTable, vocab_size: int, decode: Decode | None) -> None:
        """`decode` makes the text in which stop strings are looked for. None: no request has any."""
        self._table = table
        self._decode = decode
        self._matchers: dict[int, StopMatcher] = {}
        self._matched: set[int] = set()
        self._stops = np.zeros((len(table.active), vocab_size), np.bool_)

    def open(self, slot: int, request: GenerateRequest) -> None:
        """A sequence has got this slot."""
        self._stops[slot] = False
        self._stops[slot, list(request.stop_ids)] = True
        self._matchers.pop(slot, None)
        self._matched.discard(slot)
        if request.stop_strings and self._decode is not None:
            self._matchers[slot] = StopMatcher(self._decode, request.stop_strings)

    def ended(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: nothing comes after the last token of these rows. Ask once for each token."""
        return self._stopped(rows) | self._table.full(rows) | self._completed(rows)

    def reason(self, slot: int, max_new_tokens: int) -> FinishReason:
        """Why a row that has ended did so."""
        if slot in self._matched or self._stopped(np.array([slot]))[0]:
            return FinishReason.STOP
        sampled = int(self._table.length[slot] - self._table.prompt[slot])
        return FinishReason.LENGTH if sampled >= max_new_tokens else FinishReason.CONTEXT

    def _stopped(self, rows: np.ndarray) -> np.ndarray:
        return self._stops[rows, self._table.tokens[rows, self._table.length[rows] - 1]]

    def _completed(self, rows: np.ndarray) -> np.ndarray:
        """bool [B]: the last token completes a stop string."""
        found = np.zeros(len(rows), np.bool_)
        for index, slot in enumerate(rows.tolist()) if self._matchers else ():
            matcher = self._matchers.get(slot)
            if matcher is not None and matcher.push(int(self._table.context(slot)[-1])) is not None:
                self._matched.add(slot)
                found[index] = True
        return found
