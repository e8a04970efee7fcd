"""Guesses that a sequence repeats itself: what came after its last few tokens the last time comes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest

_SIZES = (3, 2)
"""Tokens that must have come before; the longer match is preferred."""


@final
class NgramProposer:
    """See `Proposer`. Knows of each sequence where every pair and triple of tokens ended last."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}
        """By slot: how many tokens of the context there were up to the end of a pair or triple."""
        self._noted: dict[int, int] = {}
        """By slot: leading tokens whose pairs and triples were noted."""

    def open(self, slot: int, request: GenerateRequest) -> None:
        """See `Proposer.open`."""
        self._ends[slot] = {}
        self._noted[slot] = 0

    def propose(self, slots: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        """See `Proposer.propose`. Past the end of the context, what is repeated repeats."""
        return [self._propose(*each) for each in zip(slots, contexts, most, strict=True)]

    def _propose(self, slot: int, context: np.ndarray, most: int) -> np.ndarray:
        self._note(slot, context[:-1])
        ends, last = self._ends[slot], tuple(context[-max(_SIZES) :].tolist())
        for size in _SIZES:
            end = ends.get(last[-size:]) if len(last) >= size else None
            if end is not None:
                return np.resize(context[end:], most)
        return np.empty(0, np.int32)

    def _note(self, slot: int, context: np.ndarray) -> None:
        """All but the last token of a sequence: its end must not be found as an earlier place."""
        noted, ends = self._noted[slot], self._ends[slot]
        begin = max(0, noted - max(_SIZES) + 1)
        tokens = context[begin:].tolist()
        for end in range(noted + 1 - begin, len(tokens) + 1):
            for size in _SIZES:
                if end >= size:
                    ends[tuple(tokens[end - size : end])] = begin + end
        self._noted[slot] = len(context)
