"""Which samples each step trains: a function of the seed and the step, so there is no cursor to save.

An epoch takes every sample exactly once, in an order of its own, cut into steps of at most a budget of tokens. A step
never reaches across two epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import final

import numpy as np


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The samples of one optimizer step."""

    number: int
    """The step, from 1."""
    epoch: int
    """Pass over the samples, from 0."""
    samples: tuple[int, ...]
    """Places of the samples, at least one."""


@final
class SampleOrder:
    """The steps of a run."""

    def __init__(self, tokens: Sequence[int], *, tokens_per_step: int, seed: int, shuffle: bool) -> None:
        """`tokens`: of each sample, context included; at least one sample."""
        self._tokens = tuple(tokens)
        self._budget = tokens_per_step
        self._seed = seed
        self._shuffle = shuffle

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """The steps of an epoch, each filled in order until a sample does not fit; one over the budget is alone."""
        order = range(len(self._tokens))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._tokens)).tolist()
        steps: list[list[int]] = []
        used = 0
        for sample in order:
            if not steps or used + self._tokens[sample] > self._budget:
                steps.append([])
                used = 0
            steps[-1].append(sample)
            used += self._tokens[sample]
        return [tuple(step) for step in steps]

    def steps_in(self, epochs: int) -> int:
        """Steps of the first epochs."""
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))

    def steps(self, done: int, until: int) -> Iterator[StepBatch]:
        """Steps number `done + 1` to `until`."""
        return islice(self._all(), done, until)

    def _all(self) -> Iterator[StepBatch]:
        number = 0
        for epoch in count():
            for samples in self.epoch(epoch):
                number += 1
                yield StepBatch(number=number, epoch=epoch, samples=samples)
