"""Which use of which task comes next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import msgspec
import numpy as np

from fathom.buffer.books import Books
from fathom.core.errors import CheckpointError, DataError
from fathom.core.ids import Occurrence


class SourceState(msgspec.Struct, frozen=True, tag="source.1"):
    """What fixes the order of the data. The place in it is not here: the books know it."""

    num_tasks: int
    """Tasks in one epoch."""
    seed: int
    """Seed of the order."""
    shuffle: bool
    """Whether the order is drawn from the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The next occurrence to run."""

    occurrence: Occurrence
    """The occurrence."""
    task: int
    """Index of its task."""


@final
class OccurrenceSource:
    """Occurrences in order: those that must run again first, then epoch by epoch, each a permutation of the tasks.

    The order of epoch k depends on (seed, k, number of tasks) only.
    """

    def __init__(self, *, num_tasks: int, seed: int, shuffle: bool, epochs: int | None) -> None:
        """`epochs` None: no end. Raises DataError when there are no tasks."""
        if num_tasks <= 0:
            raise DataError("there are no tasks to train on: check the data and rollout.max_prompt_tokens")
        self._order = SourceState(num_tasks=num_tasks, seed=seed, shuffle=shuffle)
        self._epochs = epochs
        self._next = Occurrence(epoch=0, index=0)
        self._again: deque[Occurrence] = deque()
        self._permutation: tuple[int, np.ndarray] | None = None

    @property
    def exhausted(self) -> bool:
        """True when nothing is left to draw. A requeue may end that."""
        return not self._again and self._epochs is not None and self._next.epoch >= self._epochs

    def next(self) -> Draw | None:
        """The next occurrence, or None when exhausted. Start it before anything else is drawn."""
        if self.exhausted:
            return None
        if self._again:
            occurrence = self._again.popleft()
        else:
            occurrence = self._next
            last_of_epoch = occurrence.index + 1 == self._order.num_tasks
            self._next = (
                Occurrence(epoch=occurrence.epoch + 1, index=0)
                if last_of_epoch
                else Occurrence(epoch=occurrence.epoch, index=occurrence.index + 1)
            )
        return Draw(occurrence=occurrence, task=self.task_of(occurrence))

    def requeue(self, occurrence: Occurrence) -> None:
        """Run an occurrence again, before new ones."""
        self._again.append(occurrence)

    def task_of(self, occurrence: Occurrence) -> int:
        """Index of the task that an occurrence uses."""
        if not self._order.shuffle:
            return occurrence.index
        if self._permutation is None or self._permutation[0] != occurrence.epoch:
            draw = np.random.default_rng([self._order.seed, occurrence.epoch])
            self._permutation = occurrence.epoch, draw.permutation(self._order.num_tasks)
        return int(self._permutation[1][occurrence.index])

    def snapshot(self) -> SourceState:
        """What a resumed source must agree with."""
        return self._order

    def resume(self, state: SourceState, books: Books) -> None:
        """Go on where the books stand: open occurrences that nothing works on run again, then those never opened.

        Raises:
            CheckpointError: the order of the data is not the one of `state`.
        """
        if state != self._order:
            raise CheckpointError(
                f"the data changed since the checkpoint ({state} then, {self._order} now): restore the data, "
                "or start a new run"
            )
        self._again = deque(books.idle())
        last = books.last_opened
        if last is None:
            self._next = Occurrence(epoch=0, index=0)
        elif last.index + 1 == self._order.num_tasks:
            self._next = Occurrence(epoch=last.epoch + 1, index=0)
        else:
            self._next = Occurrence(epoch=last.epoch, index=last.index + 1)
