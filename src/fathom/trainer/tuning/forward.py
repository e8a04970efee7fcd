"""Rows of samples through a backend, by micro-batches: the frame of every step. Letters: N tokens with loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Self, final

import numpy as np
from torch import Tensor

from fathom.core.errors import StepStoppedError
from fathom.core.records.demonstration import Demonstration
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend, Update
from fathom.trainer.loop.packing import micro_batches
from fathom.trainer.loop.trainer import Stop
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.tuning.outcome import Sums, TuningStep
from fathom.trainer.tuning.samples import Sample


@final
class Flat:
    """Rows laid end to end, with the owner of each: owners are never split over micro-batches.

    An owner that is longer than the budget is a micro-batch of its own.
    """

    def __init__(self, rows: Sequence[Demonstration], owners: Sequence[int]) -> None:
        """`owners`: ascending from 0, one for each row, none left out."""
        self.rows = rows
        self.owners = owners
        self.counts = np.array([int(row.loss_mask.sum()) for row in rows])
        """int64: tokens with loss of each row."""
        self._ends = np.cumsum(self.counts)
        self._of_owner: dict[int, list[int]] = {}
        for index, owner in enumerate(owners):
            self._of_owner.setdefault(owner, []).append(index)

    @classmethod
    def of_samples(cls, samples: Sequence[Sample]) -> Self:
        """The rows of samples; each sample owns its own."""
        owners = [place for place, sample in enumerate(samples) for _ in sample.rows]
        return cls([row for sample in samples for row in sample.rows], owners)

    def cut(self, budget: int) -> Iterator[tuple[list[int], PackedRows, np.ndarray]]:
        """(owners, their rows packed, int64 [n] the places of their tokens among all N), each owner once."""
        owners: Sequence[Hashable] = range(len(self._of_owner))
        lengths = [sum(len(self.rows[i].token_ids) for i in self._of_owner[owner]) for owner in self._of_owner]
        for batch in micro_batches(lengths, owners, budget):
            indices = [index for owner in batch for index in self._of_owner[owner]]
            packed = PackedRows.of_demonstrations([self.rows[index] for index in indices])
            places = [np.arange(self._ends[i] - self.counts[i], self._ends[i]) for i in indices]
            yield batch, packed, np.concatenate(places)


def train_step(
    backend: Backend,
    flat: Flat,
    budget: int,
    stop: Stop,
    nothing: Sums,
    loss_of: Callable[[list[int], PackedRows, np.ndarray], Callable[[TokenOutputs], tuple[Tensor, Sums]]],
) -> TuningStep[Sums]:
    """One optimizer step on rows, micro-batch by micro-batch.

    A gradient that is not finite changes nothing and is reported, and so is a step without a token in it: its gradient
    would be 0, by which momentum and weight decay still move weights.

    Args:
        backend: the policy.
        flat: the rows of the step.
        budget: tokens of a micro-batch.
        stop: raise this flag to end early.
        nothing: what the sums begin with.
        loss_of: the loss of a micro-batch, given what `Flat.cut` tells of it.

    Raises:
        StepStoppedError: `stop` said so; nothing changed.
    """
    started, sums = time.perf_counter(), nothing
    try:
        for owners, packed, places in flat.cut(budget):
            check(stop)
            sums += backend.accumulate(packed, loss_of(owners, packed, places))[0]
    except BaseException:  # raised again: the gradient of half a step must not reach the next one
        backend.discard()
        raise
    if sums.tokens:
        update = backend.update()
    else:
        backend.discard()
        update = Update(applied=False, grad_norm=0.0, lr=0.0)
    return TuningStep(
        sums=sums,
        update=update,
        forward_tokens=sum(len(row.token_ids) for row in flat.rows),
        step_s=time.perf_counter() - started,
    )


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
