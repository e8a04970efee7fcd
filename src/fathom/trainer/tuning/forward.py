"""Rows of samples through a backend, by micro-batches. Letters: N tokens with loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import final

import numpy as np

from fathom.core.errors import StepStoppedError
from fathom.core.records.demonstration import Demonstration
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.packing import micro_batches
from fathom.trainer.loop.trainer import Stop


@final
class Flat:
    """Rows laid end to end, with the owner of each: owners are never split over micro-batches.

    An owner that is longer than the budget is a micro-batch of its own.
    """

    def __init__(self, rows: Sequence[Demonstration], owners: Sequence[int]) -> None:
        """`owners`: ascending from 0, one for each row, none left out."""
        self.rows = rows
        self.counts = np.array([int(row.loss_mask.sum()) for row in rows])
        """int64: tokens with loss of each row."""
        self._ends = np.cumsum(self.counts)
        self._of_owner: dict[int, list[int]] = {}
        for index, owner in enumerate(owners):
            self._of_owner.setdefault(owner, []).append(index)

    def cut(self, budget: int) -> Iterator[tuple[list[int], PackedRows, np.ndarray]]:
        """(owners, their rows packed, int64 [n] the places of their tokens among all N), each owner once."""
        owners: Sequence[Hashable] = range(len(self._of_owner))
        lengths = [sum(len(self.rows[i].token_ids) for i in self._of_owner[owner]) for owner in self._of_owner]
        for batch in micro_batches(lengths, owners, budget):
            indices = [index for owner in batch for index in self._of_owner[owner]]
            packed = PackedRows.of_demonstrations([self.rows[index] for index in indices])
            places = [np.arange(self._ends[i] - self.counts[i], self._ends[i]) for i in indices]
            yield batch, packed, np.concatenate(places)


def score(backend: Backend, rows: Sequence[Demonstration], budget: int, stop: Stop) -> np.ndarray:
    """float64 [R]: sums of log-probabilities of each row's tokens with loss, under the current weights.

    Raises:
        StepStoppedError: `stop` said so.
    """
    sums = np.zeros(len(rows))
    for owners, packed, _ in Flat(rows, range(len(rows))).cut(budget):
        check(stop)
        parts = packed.split(backend.logprobs(packed).numpy().astype(np.float64))
        sums[owners] = [part.sum() for part in parts]
    return sums


def check(stop: Stop) -> None:
    """Raise StepStoppedError when `stop` says so."""
    if stop():
        raise StepStoppedError("stopped within a step; its samples were not trained and will be trained again")
