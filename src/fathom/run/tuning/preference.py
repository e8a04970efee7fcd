"""Preference training as the driver sees it. The reference's scores are kept in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import msgspec
import numpy as np
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fathom.config.tuning.preference import PreferenceConfig
from fathom.core.errors import CheckpointError
from fathom.ledger.events import WarmStartStepped
from fathom.ledger.tuning_events import PreferenceEvaluated, PreferenceStepped, ReferenceScored
from fathom.run.tuning.course import Stop, recorded
from fathom.run.tuning.prepare import Prepared
from fathom.sync.digest import digest
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.warm_start import warm_start
from fathom.trainer.tuning.order import StepBatch
from fathom.trainer.tuning.preference import PreferenceCourse
from fathom.trainer.tuning.samples import Pair

_FILE = "reference.safetensors"


@final
class PreferenceRun:
    """See `course.Course`."""

    def __init__(self, backend: Backend, config: PreferenceConfig, prepared: Prepared[Pair], folder: Path) -> None:
        """`folder`: the run's."""
        self._backend = backend
        self._config = config
        self._prepared = prepared
        self._file = folder / _FILE
        self._course = PreferenceCourse(backend, config.objective, config.trainer.tokens_per_micro_batch)
        self._train = np.zeros((0, 2))
        self._held_out = np.zeros((0, 2))

    def begin(self, stop: Stop) -> Iterator[WarmStartStepped | ReferenceScored]:
        """The warm start if there is one; then the reference scores every pair once."""
        config = self._config
        if config.warm_start is not None:
            shown = [row for pair in self._prepared.train[: config.warm_start.tasks] for row in pair.chosen]
            budget = config.trainer.tokens_per_micro_batch
            steps = warm_start(
                self._backend, shown, config.warm_start, tokens_per_micro_batch=budget, seed=config.seed, stop=stop
            )
            for step in steps:
                yield WarmStartStepped(step=step.step, loss=step.loss, tokens=step.tokens)
            self._backend.begin_phase(config.trainer.optimizer, self._prepared.steps)
        started = time.perf_counter()
        self._train = self._course.score(self._prepared.train, stop)
        self._held_out = self._course.score(self._prepared.held_out, stop)
        written = save({"train": self._train, "held_out": self._held_out})
        unfinished = self._file.with_suffix(".new")
        unfinished.write_bytes(written)
        unfinished.rename(self._file)
        yield ReferenceScored(
            weights_digest=digest(self._backend.weights()),
            scores_digest=blake3(written).hexdigest(),
            pairs=len(self._train) + len(self._held_out),
            seconds=time.perf_counter() - started,
        )

    def resume(self, scored: ReferenceScored | None) -> None:
        """Read the reference's scores."""
        try:
            written = self._file.read_bytes()
            if scored is None or blake3(written).hexdigest() != scored.scores_digest:
                raise CheckpointError(
                    f"{self._file} is not what the reference scored when the run began: restore it, or begin a new run"
                )
            scores = load(written)
            self._train, self._held_out = scores["train"], scores["held_out"]
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"the reference's scores {self._file} cannot be read: {error}; restore it, or begin a new run"
            ) from error
        if (len(self._train), len(self._held_out)) != (len(self._prepared.train), len(self._prepared.held_out)):
            raise CheckpointError(
                f"{self._file} scores {len(self._train)} + {len(self._held_out)} pairs, and the files now have "
                f"{len(self._prepared.train)} + {len(self._prepared.held_out)}; resume with the data it began with"
            )

    def step(self, batch: StepBatch, stop: Stop) -> PreferenceStepped:
        """See `course.Course`."""
        pairs = [self._prepared.train[place] for place in batch.samples]
        taken = self._course.step(pairs, self._train[list(batch.samples)], stop)
        sums, count = taken.sums, max(1, taken.sums.pairs)
        return PreferenceStepped(
            **msgspec.structs.asdict(recorded(batch, taken, self._backend)),
            accuracy=sums.correct / count,
            margin=sums.margin / count,
            chosen_reward=sums.chosen_reward / count,
            rejected_reward=sums.rejected_reward / count,
        )

    def evaluate(self, done: int, stop: Stop) -> PreferenceEvaluated | None:
        """See `course.Course`."""
        if not self._prepared.held_out:
            return None
        started = time.perf_counter()
        scores = self._course.evaluate(self._prepared.held_out, self._held_out, stop)
        logprobs = np.array(scores.logprobs)
        lengths = np.array(scores.tokens) if self._config.objective.length_normalised else np.ones_like(logprobs)
        rewards = self._config.objective.beta * (logprobs - np.array(scores.reference)) / lengths
        margins, probabilities = rewards[:, 0] - rewards[:, 1], np.exp(logprobs)
        odds, smoothing = logprobs[:, 0] - logprobs[:, 1], self._config.objective.label_smoothing
        loss = (1 - smoothing) * np.logaddexp(0, -margins) + smoothing * np.logaddexp(0, margins)
        return PreferenceEvaluated(
            step=done,
            loss=float(loss.mean()),
            accuracy=_share_above_zero(margins),
            preferred=_share_above_zero(odds),
            margins=tuple(margins.tolist()),
            log_odds=tuple(odds.tolist()),
            chosen_reward=float(rewards[:, 0].mean()),
            rejected_reward=float(rewards[:, 1].mean()),
            chosen_probability=float(probabilities[:, 0].mean()),
            rejected_probability=float(probabilities[:, 1].mean()),
            chosen_probabilities=tuple(probabilities[:, 0].tolist()),
            seconds=time.perf_counter() - started,
        )


def _share_above_zero(values: np.ndarray) -> float:
    """0 counts half."""
    return float(np.mean(values > 0) + 0.5 * np.mean(values == 0))
