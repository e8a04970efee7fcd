"""The supervised phase before RL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from torch import Tensor

from fathom.config.trainer import WarmStartConfig
from fathom.core.errors import DataError, FathomError, StepStoppedError
from fathom.core.records.demonstration import Demonstration
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.packing import micro_batches
from fathom.trainer.loop.trainer import Stop, never
from fathom.trainer.objective.outputs import TokenOutputs

_RECENT_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartStep:
    """One supervised step."""

    step: int
    """From 1."""
    loss: float
    """Token-mean negative log-likelihood before the step."""
    tokens: int
    """Tokens imitated."""


def warm_start(
    backend: Backend,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    *,
    tokens_per_micro_batch: int,
    seed: int,
    stop: Stop = never,
) -> Iterator[WarmStartStep]:
    """Imitate for `config.steps` steps of `config.batch_size` demonstrations, in a seeded order.

    Ends before that once the mean loss of the last 10 steps is at most `config.until_loss`, where that is set.

    Loss: -log-probability, averaged over the tokens of the step (`algorithms.md` D.8). The phase has its own optimizer
    and counter; `Trainer.begin` starts RL after it.

    Raises:
        DataError: there are no demonstrations.
        FathomError: a gradient is not finite.
        StepStoppedError: `stop` said so. Steps that were yielded stay taken.
    """
    if not demonstrations:
        raise DataError("a warm start needs demonstrations and the task gave none; remove [warm_start]")
    backend.begin_phase(config.optimizer, config.steps)
    order = _endless_order(len(demonstrations), seed)
    recent: deque[float] = deque(maxlen=_RECENT_STEPS)
    for step in range(1, config.steps + 1):
        chosen = [demonstrations[index] for index in islice(order, config.batch_size)]
        tokens = sum(int(demonstration.loss_mask.sum()) for demonstration in chosen)
        loss = _accumulate(backend, chosen, tokens, tokens_per_micro_batch, stop)
        if not backend.update().applied:
            raise FathomError(f"warm start: the gradient of step {step} is not finite; lower warm_start.optimizer.lr")
        yield WarmStartStep(step=step, loss=loss, tokens=tokens)
        recent.append(loss)
        if config.until_loss is not None and len(recent) == _RECENT_STEPS and np.mean(recent) <= config.until_loss:
            return


def _accumulate(backend: Backend, chosen: Sequence[Demonstration], tokens: int, budget: int, stop: Stop) -> float:
    def loss_of(outputs: TokenOutputs) -> tuple[Tensor, float]:
        loss = -outputs.logprobs.sum() / tokens
        return loss, float(loss.detach())

    total = 0.0
    lengths = [len(demonstration.token_ids) for demonstration in chosen]
    for batch in micro_batches(lengths, range(len(chosen)), budget):
        if stop():
            backend.discard()
            raise StepStoppedError("stopped within a warm start; start the run again")
        share, _ = backend.accumulate(PackedRows.of_demonstrations([chosen[index] for index in batch]), loss_of)
        total += share
    return total


def _endless_order(size: int, seed: int) -> Iterator[int]:
    """Every index once an epoch, each epoch in an order of its own."""
    for epoch in count():
        yield from np.random.default_rng([seed, epoch]).permutation(size).tolist()
