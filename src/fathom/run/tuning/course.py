"""What the driver asks of a way to tune; each computes in the trainer's thread and tells what happened as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from fathom.ledger.events import WarmStartStepped
from fathom.ledger.tuning_events import (
    PreferenceEvaluated,
    PreferenceStepped,
    ReferenceScored,
    SupervisedEvaluated,
    SupervisedStepped,
)
from fathom.trainer.tuning.order import StepBatch

Stop = Callable[[], bool]
Stepped = SupervisedStepped | PreferenceStepped
Evaluated = SupervisedEvaluated | PreferenceEvaluated


class Course(Protocol):
    """A way to tune. Each call raises StepStoppedError when `stop` says so; nothing of a step is done then."""

    def begin(self, stop: Stop) -> Iterator[WarmStartStepped | ReferenceScored]:
        """What comes before the first step of a fresh run."""
        ...

    def resume(self) -> None:
        """Take up what `begin` left. Raises CheckpointError when it is not there."""
        ...

    def step(self, batch: StepBatch, stop: Stop) -> Stepped:
        """One optimizer step. Raises FathomError when its gradient is not finite."""
        ...

    def evaluate(self, done: int, stop: Stop) -> Evaluated | None:
        """Score what is held out; `done`: steps behind the weights. None: nothing is."""
        ...
