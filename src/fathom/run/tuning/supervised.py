"""Supervised fine-tuning as the driver sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import final

import msgspec
import numpy as np

from fathom.config.tuning.supervised import SupervisedConfig
from fathom.ledger.events import WarmStartStepped
from fathom.ledger.tuning_events import ReferenceScored, SupervisedEvaluated, SupervisedStepped
from fathom.run.tuning.course import Stop, recorded
from fathom.run.tuning.prepare import Prepared
from fathom.trainer.backends.port import Backend
from fathom.trainer.tuning.imitation import ImitationCourse
from fathom.trainer.tuning.order import StepBatch
from fathom.trainer.tuning.samples import Conversation


@final
class SupervisedRun:
    """See `course.Course`."""

    def __init__(self, backend: Backend, config: SupervisedConfig, prepared: Prepared[Conversation]) -> None:
        self._backend = backend
        self._prepared = prepared
        self._course = ImitationCourse(backend, config.objective, config.trainer.tokens_per_micro_batch)

    def begin(self, stop: Stop) -> Iterator[WarmStartStepped | ReferenceScored]:
        """Nothing."""
        return iter(())

    def resume(self, scored: ReferenceScored | None) -> None:
        """Nothing."""

    def step(self, batch: StepBatch, stop: Stop) -> SupervisedStepped:
        """See `course.Course`."""
        taken = self._course.step([self._prepared.train[place] for place in batch.samples], stop)
        common = msgspec.structs.asdict(recorded(batch, taken, self._backend))
        return SupervisedStepped(**common, nll=taken.sums.nll / max(1, taken.sums.tokens))

    def evaluate(self, done: int, stop: Stop) -> SupervisedEvaluated | None:
        """See `course.Course`."""
        if not self._prepared.held_out:
            return None
        started = time.perf_counter()
        scores = self._course.evaluate(self._prepared.held_out, stop)
        logprobs, tokens = np.array(scores.logprobs), np.array(scores.tokens)
        probabilities = tuple(map(math.exp, scores.logprobs))
        return SupervisedEvaluated(
            step=done,
            loss=float(-logprobs.sum() / tokens.sum()),
            tokens=int(tokens.sum()),
            per_sample=tuple((-logprobs / tokens).tolist()),
            probability=float(np.mean(probabilities)),
            probabilities=probabilities,
            seconds=time.perf_counter() - started,
        )
