"""The trainer as the event loop sees it: one thread that computes, while the loop goes on serving rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from fathom.config.trainer import WarmStartConfig
from fathom.core.adapter import AdapterIdentity, MergeRounding
from fathom.core.manifest import TensorEntry
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.row import Row, row_of_text
from fathom.core.records.step import StepOutcome, TrainBatch
from fathom.run.stop import Stop
from fathom.run.weights.adapters import Outgoing
from fathom.sync.digest import layout, root_digest
from fathom.trainer.backends.port import Backend
from fathom.trainer.loop.trainer import Trainer
from fathom.trainer.loop.warm_start import WarmStartStep, warm_start

T = TypeVar("T")


@final
class Learner:
    """The thread in which everything of the trainer runs, one call at a time."""

    def __init__(
        self, trainer: Trainer, backend: Backend, stop: Stop, thread: ThreadPoolExecutor, *, merges: bool, alone: bool
    ) -> None:
        """`thread` is a pool of one; see `start` and `beside`."""
        self._alone = alone
        self._merges = merges
        self._merged: tuple[int, Mapping[str, Tensor], MergeRounding | None] | None = None
        self._entries: tuple[int, Sequence[TensorEntry]] | None = None
        self._trainer = trainer
        self._backend = backend
        self._stop = stop
        self._thread = thread

    @classmethod
    async def start(cls, load: Callable[[], tuple[Trainer, Backend]], stop: Stop, *, merges: bool = False) -> Self:
        """Load the trainer in the thread that will use it: torch's threads are then made there, and only there.

        `merges`: an adapter goes out merged into the whole model.

        Raises what `load` raises.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            trainer, backend = await asyncio.get_running_loop().run_in_executor(thread, load)
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            raise
        return cls(trainer, backend, stop, thread, merges=merges, alone=True)

    @classmethod
    def beside(cls, trainer: Trainer, backend: Backend, stop: Stop, thread: ThreadPoolExecutor) -> Self:
        """One of several whose calls take turns in `thread`, where they were loaded, and which stays when this ends."""
        return cls(trainer, backend, stop, thread, merges=False, alone=False)

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights."""
        return self._trainer.version

    @property
    def adapter(self) -> AdapterIdentity | None:
        """The adapter that is trained. None: the whole model is."""
        return self._backend.adapter

    async def outgoing(self) -> Outgoing:
        """What is published of the current version; it must not be read while a step runs."""
        return await self._call(self._take_out)

    async def steps(self, batch: TrainBatch, version: int) -> AsyncIterator[StepOutcome]:
        """Train on a batch, one outcome after each step. Raises StepStoppedError when the run is asked to end."""
        steps = self._trainer.steps(batch, version, lambda: self._stop.asked)
        while (outcome := await self._call(lambda: next(steps, None))) is not None:
            yield outcome

    async def warm_start(
        self, demonstrations: Sequence[Demonstration], config: WarmStartConfig, tokens_per_micro_batch: int, seed: int
    ) -> AsyncIterator[WarmStartStep]:
        """Imitate demonstrations before RL begins."""
        self._merged = self._entries = None
        steps = warm_start(
            self._backend,
            demonstrations,
            config,
            tokens_per_micro_batch=tokens_per_micro_batch,
            seed=seed,
            stop=lambda: self._stop.asked,
        )
        while (step := await self._call(lambda: next(steps, None))) is not None:
            yield step

    async def begin(self) -> None:
        """RL starts from the current weights, as version 0."""
        self._merged = self._entries = None
        await self._call(self._trainer.begin)

    async def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """float32 [N] for each row, under the current weights."""
        return await self._call(lambda: self._trainer.logprobs(rows))

    async def text_logprobs(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float32 [T-1] for each int32 [T]: log-probabilities of all tokens but the first, at temperature 1."""
        return await self.logprobs([row_of_text(text) for text in texts])

    async def digest(self) -> str:
        """Root digest (hex) of what is published of the current version."""
        return await self._call(lambda: root_digest(self._take_out().entries))

    async def save(self, write: Callable[[Callable[[Path], None]], T]) -> T:
        """Run `write`, which is given the function that saves the trainer into a folder."""
        return await self._call(lambda: write(self._backend.save))

    async def load(self, folder: Path) -> None:
        """Become what a checkpoint holds."""
        self._merged = self._entries = None
        await self._call(lambda: self._backend.load(folder))

    def _take_out(self) -> Outgoing:
        """Merging and digesting take long, and each version is asked for twice."""
        if self._merges:
            if self._merged is None or self._merged[0] != self.version:
                self._merged = self.version, *self._backend.whole()
            _, tensors, merging = self._merged
            adapter = None
        else:
            tensors, merging, adapter = self._backend.weights(), None, self._backend.adapter
        if self._entries is None or self._entries[0] != self.version:
            self._entries = self.version, layout(tensors, threads=torch.get_num_threads())
        return Outgoing(tensors=tensors, entries=self._entries[1], adapter=adapter, merging=merging)

    def close(self) -> None:
        """Let the thread end after the forward it is in; one that others use goes on."""
        if self._alone:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
