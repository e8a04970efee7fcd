"""Preference training, step by step. The reference's scores are computed once, from the weights that the run starts
from: there is no second model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.config.tuning.preference import PreferenceObjectiveConfig
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.trainer import Stop, never
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.preference import PreferenceSums, preference_loss
from fathom.trainer.tuning.forward import Flat, score, train_step
from fathom.trainer.tuning.outcome import PreferenceScores, TuningStep
from fathom.trainer.tuning.samples import Pair, loss_tokens

_LossOf = Callable[[TokenOutputs], tuple[Tensor, PreferenceSums]]


@final
class PreferenceCourse:
    """Tells chosen from rejected answers. A pair's sides are always in one forward."""

    def __init__(self, backend: Backend, objective: PreferenceObjectiveConfig, tokens_per_micro_batch: int) -> None:
        self._backend = backend
        self._objective = objective
        self._budget = tokens_per_micro_batch

    def score(self, pairs: Sequence[Pair], stop: Stop = never) -> np.ndarray:
        """float64 [P, 2]: sums of log-probabilities of (chosen, rejected) under the current weights.

        Raises:
            StepStoppedError: `stop` said so.
        """
        rows = [row for pair in pairs for row in pair.rows]
        sides = [2 * place + side for place, pair in enumerate(pairs) for side in _sides(pair)]
        sums = np.zeros(2 * len(pairs))
        np.add.at(sums, sides, score(self._backend, rows, self._budget, stop))
        return sums.reshape(-1, 2)

    def step(self, pairs: Sequence[Pair], reference: np.ndarray, stop: Stop = never) -> TuningStep[PreferenceSums]:
        """One optimizer step on these pairs, at least one.

        A gradient that is not finite changes nothing and is reported.

        Args:
            pairs: the pairs.
            reference: float64 [P, 2]: `score` of the reference.
            stop: raise this flag to end early.

        Raises:
            StepStoppedError: `stop` said so; nothing changed.
        """

        def loss_of(owners: list[int], packed: PackedRows, places: np.ndarray) -> _LossOf:
            sides = np.array([2 * at + side for at, pair in enumerate(owners) for side in _sides(pairs[pair])])
            side = torch.from_numpy(np.repeat(sides, packed.loss_lengths))
            frozen = torch.from_numpy(reference[owners])
            return lambda outputs: preference_loss(self._objective, outputs.logprobs, side, frozen, len(pairs))

        flat = Flat.of_samples(pairs)
        return train_step(self._backend, flat, self._budget, stop, PreferenceSums(), loss_of)

    def evaluate(self, pairs: Sequence[Pair], reference: np.ndarray, stop: Stop = never) -> PreferenceScores:
        """Score pairs under the current weights. Raises StepStoppedError."""
        scored = self.score(pairs, stop)
        return PreferenceScores(
            logprobs=tuple((float(chosen), float(rejected)) for chosen, rejected in scored),
            reference=tuple((float(chosen), float(rejected)) for chosen, rejected in reference),
            tokens=tuple((loss_tokens(pair.chosen), loss_tokens(pair.rejected)) for pair in pairs),
        )


def _sides(pair: Pair) -> list[int]:
    """0 for each chosen row, 1 for each rejected."""
    return [0] * len(pair.chosen) + [1] * len(pair.rejected)
