"""Supervised fine-tuning, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.config.tuning.supervised import SupervisedObjectiveConfig
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.trainer import Stop, never
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.supervised import ImitationSums, coefficients, imitation_loss
from fathom.trainer.tuning.forward import Flat, check, score
from fathom.trainer.tuning.outcome import ImitationScores, ImitationStep, StepCost
from fathom.trainer.tuning.samples import Conversation, loss_tokens


@final
class ImitationCourse:
    """Imitates conversations. Packing changes no result: the step's denominators are known before its first forward."""

    def __init__(self, backend: Backend, objective: SupervisedObjectiveConfig, tokens_per_micro_batch: int) -> None:
        self._backend = backend
        self._objective = objective
        self._budget = tokens_per_micro_batch

    def step(self, samples: Sequence[Conversation], stop: Stop = never) -> ImitationStep:
        """One optimizer step on these conversations, at least one.

        A gradient that is not finite changes nothing and is reported.

        Raises:
            StepStoppedError: `stop` said so; nothing changed.
        """
        started = time.perf_counter()
        owners = [place for place, sample in enumerate(samples) for _ in sample.rows]
        flat = Flat([row for sample in samples for row in sample.rows], owners)
        sequence = torch.from_numpy(np.repeat(np.array(owners, np.int64), flat.counts))
        shares = coefficients(self._objective.aggregation, sequence, len(samples), self._objective.constant_length)
        sums = ImitationSums()
        try:
            for _, packed, places in flat.cut(self._budget):
                check(stop)
                share = shares[torch.from_numpy(places)]

                def loss_of(outputs: TokenOutputs, share: Tensor = share) -> tuple[Tensor, ImitationSums]:
                    return imitation_loss(share, outputs.logprobs)

                sums += self._backend.accumulate(packed, loss_of)[0]
        except BaseException:  # raised again: the gradient of half a step must not reach the next one
            self._backend.discard()
            raise
        cost = StepCost(
            update=self._backend.update(),
            forward_tokens=sum(sample.tokens for sample in samples),
            step_s=time.perf_counter() - started,
        )
        return ImitationStep(sums=sums, cost=cost)

    def evaluate(self, samples: Sequence[Conversation], stop: Stop = never) -> ImitationScores:
        """Score conversations under the current weights. Raises StepStoppedError."""
        rows = [row for sample in samples for row in sample.rows]
        sums = score(self._backend, rows, self._budget, stop)
        ends = np.cumsum([len(sample.rows) for sample in samples])
        return ImitationScores(
            logprobs=tuple(float(part.sum()) for part in np.split(sums, ends[:-1])),
            tokens=tuple(loss_tokens(sample.rows) for sample in samples),
        )
