"""Whoever drafts tokens. A draft can be wrong at no cost but time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fathom.core.ports.engine import GenerateRequest


class Proposer(Protocol):
    """Guesses how sequences go on. One thread uses it."""

    def open(self, slot: int, request: GenerateRequest) -> None:
        """A new sequence has this slot."""
        ...

    def propose(self, slots: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        """int32: the next tokens of each slot as far as there is a guess, at most `most` (each at least 1).

        `contexts` are all tokens of these sequences so far, int32, valid during the call. Every token lies in the
        vocabulary.
        """
        ...
