"""Supervised fine-tuning, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.config.tuning.supervised import SupervisedObjectiveConfig
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.trainer import Stop, never
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.supervised import ImitationSums, coefficients, imitation_loss
from fathom.trainer.tuning.forward import Flat, score, train_step
from fathom.trainer.tuning.outcome import ImitationScores, TuningStep
from fathom.trainer.tuning.samples import Conversation, loss_tokens

_LossOf = Callable[[TokenOutputs], tuple[Tensor, ImitationSums]]


@final
class ImitationCourse:
    """Imitates conversations. Packing changes no result: the step's denominators are known before its first forward."""

    def __init__(self, backend: Backend, objective: SupervisedObjectiveConfig, tokens_per_micro_batch: int) -> None:
        self._backend = backend
        self._objective = objective
        self._budget = tokens_per_micro_batch

    def step(self, samples: Sequence[Conversation], stop: Stop = never) -> TuningStep[ImitationSums]:
        """One optimizer step on these conversations, at least one.

        A gradient that is not finite changes nothing and is reported.

        Raises:
            StepStoppedError: `stop` said so; nothing changed.
        """
        flat = Flat.of_samples(samples)
        sequence = torch.from_numpy(np.repeat(np.array(flat.owners, np.int64), flat.counts))
        shares = coefficients(self._objective.aggregation, sequence, len(samples), self._objective.constant_length)

        def loss_of(owners: list[int], packed: PackedRows, places: np.ndarray) -> _LossOf:
            share = shares[torch.from_numpy(places)]
            return lambda outputs: imitation_loss(share, outputs.logprobs)

        return train_step(self._backend, flat, self._budget, stop, ImitationSums(), loss_of)

    def evaluate(self, samples: Sequence[Conversation], stop: Stop = never) -> ImitationScores:
        """Score conversations under the current weights. Raises StepStoppedError."""
        rows = [row for sample in samples for row in sample.rows]
        sums = score(self._backend, rows, self._budget, stop)
        ends = np.cumsum([len(sample.rows) for sample in samples])
        return ImitationScores(
            logprobs=tuple(float(part.sum()) for part in np.split(sums, ends[:-1])),
            tokens=tuple(loss_tokens(sample.rows) for sample in samples),
        )
