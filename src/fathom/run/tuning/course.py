"""What the driver asks of a way to tune; each computes in the trainer's thread and tells what happened as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from fathom.core.errors import FathomError
from fathom.ledger.events import WarmStartStepped
from fathom.ledger.tuning_events import (
    PreferenceEvaluated,
    PreferenceStepped,
    ReferenceScored,
    SupervisedEvaluated,
    SupervisedStepped,
    TuningStepped,
)
from fathom.sync.digest import digest
from fathom.trainer.backends.port import Backend
from fathom.trainer.tuning.order import StepBatch
from fathom.trainer.tuning.outcome import Sums, TuningStep

Stop = Callable[[], bool]
Stepped = SupervisedStepped | PreferenceStepped
Evaluated = SupervisedEvaluated | PreferenceEvaluated


class Course(Protocol):
    """A way to tune. Each call raises StepStoppedError when `stop` says so; nothing of a step is done then."""

    def begin(self, stop: Stop) -> Iterator[WarmStartStepped | ReferenceScored]:
        """What comes before the first step of a fresh run."""
        ...

    def resume(self, scored: ReferenceScored | None) -> None:
        """Take up what `begin` left; `scored`: what it recorded. Raises CheckpointError when that is not there."""
        ...

    def step(self, batch: StepBatch, stop: Stop) -> Stepped:
        """One optimizer step. Raises FathomError when nothing of it is finite, or its gradient is not."""
        ...

    def evaluate(self, done: int, stop: Stop) -> Evaluated | None:
        """Score what is held out; `done`: steps behind the weights. None: nothing is."""
        ...


def recorded(batch: StepBatch, taken: TuningStep[Sums], backend: Backend) -> TuningStepped:
    """What every kind of step records. Raises FathomError when the step was not taken."""
    if not taken.sums.tokens:
        raise FathomError(
            f"no log-probability of step {batch.number} is finite: the weights have diverged; nothing changed: begin "
            "again with a lower trainer.optimizer.lr"
        )
    if not taken.update.applied:
        raise FathomError(
            f"the gradient of step {batch.number} is not finite; nothing changed: lower trainer.optimizer.lr and resume"
        )
    return TuningStepped(
        number=batch.number,
        epoch=batch.epoch,
        samples=batch.samples,
        loss=taken.sums.loss,
        tokens=taken.sums.tokens,
        non_finite=taken.sums.non_finite,
        forward_tokens=taken.forward_tokens,
        grad_norm=taken.update.grad_norm,
        lr=taken.update.lr,
        step_s=taken.step_s,
        weights_digest=digest(backend.weights()),
    )
