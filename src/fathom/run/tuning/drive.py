"""Drives a run that tunes: the model in a thread of its own, the history in this one. Importing this loads torch.

begin (a fresh run)  ->  evaluate  ->  step, step, ...  ->  evaluate  ->  checkpoint  ->  the model's folder
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar, final

import msgspec

from fathom.core.errors import CheckpointError, StepStoppedError
from fathom.ledger.events import CheckpointSaved, RunEnded
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import ModelSaved, ReferenceScored, TuningPrepared
from fathom.run.history.checkpoint import Checkpoints
from fathom.run.history.folder import RunFolder
from fathom.run.history.opening import open_history
from fathom.run.history.recorder import Observer, Recorder
from fathom.run.history.trackers import SINKS, TrackerFeed
from fathom.run.starting_weights import require_devices, starting_weights
from fathom.run.stop import Stop
from fathom.run.tuning.course import Course
from fathom.run.tuning.plan import PreferencePlan, SupervisedPlan, TuningPlan
from fathom.run.tuning.preference import PreferenceRun
from fathom.run.tuning.supervised import SupervisedRun
from fathom.run.weights.adapters import adapter_start
from fathom.sync.digest import digest
from fathom.trainer.backends.state import MODEL_FOLDER
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.tuning.samples import loss_tokens

T = TypeVar("T")


class TuningState(msgspec.Struct, frozen=True, tag="tuning_state.1"):
    """Where a run that tunes stood. Data order and random numbers need no state: they follow from seed and step."""

    ledger_seq: int
    """Last event of the history that this state is the result of."""
    step: int
    """Optimizer steps taken."""
    digest: str
    """Of the samples and their order, as `TuningPrepared` has it."""
    held_out_digest: str = ""
    """Of the samples to evaluate on, as `TuningPrepared` has it."""


async def drive(plan: TuningPlan, folder: RunFolder, stop: Stop, observers: tuple[Observer, ...]) -> str:
    """Open an incarnation of the run in `folder`, go on from its newest checkpoint or begin, and run to the end.

    Returns how it ended: `steps` or `stopped`. An error is recorded and raised.

    Raises:
        ConfigError: the device is not there.
        CheckpointError: the newest checkpoint cannot be read.
    """
    config = plan.config
    require_devices({"trainer.device": config.trainer.device})
    checkpoints = Checkpoints(folder.checkpoints, TuningState, keep=config.checkpoint.keep, fsync=config.ledger.fsync)
    newest = checkpoints.newest()
    state = newest[0] if newest else None
    if state is not None and state.digest != plan.prepared.digest:
        raise CheckpointError(
            "the samples, or what decides their order (seed, trainer.tokens_per_step, trainer.shuffle), are not those "
            "of the checkpoint; resume with the data and options that the run began with"
        )
    if state is not None and state.held_out_digest not in ("", plan.prepared.held_out_digest):
        raise CheckpointError(
            "the held-out samples are not those that the run was evaluated on before, so nothing could be compared; "
            "resume with the data that it began with"
        )
    recorder = open_history(
        config,
        folder,
        observers,
        parent_seq=state.ledger_seq if state else None,
        start_step=state.step if state else 0,
    )
    sinks = [SINKS[tracker] for tracker in config.trackers]
    feeds = [TrackerFeed(folder.ledger, partial(sink, folder.path, recorder.incarnation)) for sink in sinks]
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    try:
        reason = await _Driver(plan, folder, stop, recorder, checkpoints, thread).run(newest)
    except BaseException as error:
        recorder.record(RunEnded(reason=f"{type(error).__name__}: {error}", step=checkpoints.newest_step))
        raise
    else:
        recorder.record(RunEnded(reason=reason, step=checkpoints.newest_step))
        return reason
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
        recorder.close()
        for feed in feeds:
            feed.close()


@final
class _Driver:
    def __init__(
        self,
        plan: TuningPlan,
        folder: RunFolder,
        stop: Stop,
        recorder: Recorder,
        checkpoints: Checkpoints[TuningState],
        thread: ThreadPoolExecutor,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._stop = stop
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._thread = thread
        self._saved = 0
        self._evaluated = -1

    async def run(self, newest: tuple[TuningState, Path] | None) -> str:
        plan = self._plan
        self._recorder.record(_facts(plan))
        source = starting_weights(plan.prepared.model, plan.config.model.tiny, plan.config.seed, self._folder)
        backend, course = await self._call(lambda: _load(plan, source, self._folder.path))
        done = newest[0].step if newest else 0
        try:
            if newest is None:
                await self._begin(course)
                await self._evaluate(course, 0)
            else:
                await self._call(lambda: backend.load(newest[1]))
                await self._call(lambda: course.resume(self._reference()))
                self._saved = done
            for batch in plan.prepared.order.steps(done, plan.prepared.steps):
                stepped = await self._call(lambda batch=batch: course.step(batch, self._asked))
                done = batch.number
                self._recorder.record(stepped)
                self._recorder.commit()
                if _due(plan.config.evaluation.every_steps, done):
                    await self._evaluate(course, done)
                if _due(plan.config.checkpoint.every_steps, done):
                    await self._checkpoint(backend, done)
            if self._evaluated != done:
                await self._evaluate(course, done)
        except StepStoppedError:
            if done > self._saved:
                await self._checkpoint(backend, done)
            return "stopped"
        await self._checkpoint(backend, done)
        await self._save_model(backend, done)
        return "steps"

    def _reference(self) -> ReferenceScored | None:
        with LedgerReader(self._folder.ledger) as reader:
            scored = reader.latest(ReferenceScored)
        return scored.event if scored is not None else None

    def _asked(self) -> bool:
        return self._stop.asked

    async def _begin(self, course: Course) -> None:
        events = course.begin(self._asked)
        while (event := await self._call(lambda: next(events, None))) is not None:
            self._recorder.record(event)
        self._recorder.commit()

    async def _evaluate(self, course: Course, done: int) -> None:
        event = await self._call(lambda: course.evaluate(done, self._asked))
        self._evaluated = done
        if event is not None:
            self._recorder.record(event)
            self._recorder.commit()

    async def _checkpoint(self, backend: TorchBackend, done: int) -> None:
        if done == self._saved:
            return
        started = time.perf_counter()
        prepared = self._plan.prepared
        state = TuningState(
            ledger_seq=self._recorder.last_seq,
            step=done,
            digest=prepared.digest,
            held_out_digest=prepared.held_out_digest,
        )
        path = await self._call(lambda: self._checkpoints.save(state, backend.save))
        self._saved = done
        where = str(path.relative_to(self._folder.path))
        self._recorder.record(CheckpointSaved(step=done, path=where, seconds=time.perf_counter() - started))
        self._recorder.commit()

    async def _save_model(self, backend: TorchBackend, done: int) -> None:
        """The model of the last checkpoint, with its tokenizer, as a folder of its own."""
        newest = self._checkpoints.newest()
        assert newest is not None, "the last step always has a checkpoint"
        unfinished = self._folder.trained.with_name(".unfinished-trained")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(newest[1] / MODEL_FOLDER, unfinished)
        shutil.copytree(self._folder.tokenizer, unfinished, dirs_exist_ok=True)
        shutil.rmtree(self._folder.trained, ignore_errors=True)
        unfinished.rename(self._folder.trained)
        root = await self._call(lambda: digest(backend.weights()))
        self._recorder.record(ModelSaved(step=done, path=self._folder.trained.name, weights_digest=root))

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _load(plan: TuningPlan, source: Path, folder: Path) -> tuple[TorchBackend, Course]:
    config = plan.config
    adapter = adapter_start(config.lora, config.name, config.seed, config.model.path)
    backend = TorchBackend(source, config.trainer.for_backend(plan.prepared.steps), adapter=adapter)
    match plan:
        case SupervisedPlan():
            return backend, SupervisedRun(backend, plan.config, plan.prepared)
        case PreferencePlan():
            return backend, PreferenceRun(backend, plan.config, plan.prepared, folder)


def _facts(plan: TuningPlan) -> TuningPrepared:
    prepared = plan.prepared
    return TuningPrepared(
        kind=plan.config.kind,
        samples=len(prepared.train),
        held_out=len(prepared.held_out),
        rows=len(prepared.rows),
        loss_tokens=loss_tokens(prepared.rows),
        tokens=sum(sample.tokens for sample in prepared.train),
        left_out=prepared.counted.left_out,
        truncated=prepared.counted.truncated,
        also_held_out=prepared.counted.also_held_out,
        steps=prepared.steps,
        digest=prepared.digest,
        held_out_digest=prepared.held_out_digest,
    )


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0
