"""The decode loop: the only thread that touches the model.

Each turn: answer calls (at a token boundary), admit waiting generations into free slots, compute one step of what
runs, answer one score request, send what was sampled. With nothing to do it checks its books and waits for a call. It
waits for no client and no disk. Schedulers of several adapters take turns in one loop.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn, TypeVar, final

import torch

from fathom.core.adapter import AdapterIdentity, why_another
from fathom.core.errors import EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    EngineStatus,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
)
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.admission_queue import AdmissionQueue
from fathom.rollout.engines.embedded.messages import Failure, FailureKind, RequestFailure, Scored, Streamed
from fathom.rollout.engines.embedded.server.decode.decoder import Decoder
from fathom.rollout.engines.embedded.server.job import Job, Stream
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet, WeightSets
from fathom.rollout.engines.refusals import not_held, why_not_generate, why_not_score, why_not_version
from fathom.rollout.engines.seen_requests import SeenRequests
from fathom.sync.held import Held

T = TypeVar("T")
Calls = queue.SimpleQueue[Callable[[], None]]
"""What other threads ask of the decode loop."""
Deliver = Callable[[list[tuple[Stream, Streamed]]], None]
"""Hands chunks to the event loop's thread."""

_FLUSH_S = 0.05
"""Tokens of a running sequence are sent no more often than this,"""
_CHUNKS_PER_S = 250
"""and so that all sequences together make no more chunks than this: each costs both processes a fraction of a ms."""


def serve(schedulers: Sequence[Scheduler], calls: Calls) -> NoReturn:
    """Give each its turn, for ever; `calls` are those of all of them.

    An exception from a model or from the books ends the process: its state cannot be trusted.
    """
    with torch.inference_mode():
        while True:
            if not any([each.turn() for each in schedulers]):
                calls.get()()


@dataclass(slots=True, kw_only=True)
class _Drain:
    """A commit that waits for running generations to end."""

    version: PolicyVersion
    answer: Future[CommitReport]


@final
class Scheduler:
    """State is touched on the loop's thread only: other threads hand it functions with `call`."""

    def __init__(
        self,
        engine: EngineId,
        capabilities: Capabilities,
        decoder: Decoder,
        weights: WeightSets,
        deliver: Deliver,
        adapter: AdapterIdentity | None = None,
        calls: Calls | None = None,
    ) -> None:
        """`adapter`: what `weights` are of, and the base beside them; None: a whole model. `calls`: those of the loop,
        if others are served in it, too; None: nobody is."""
        self._engine = engine
        self._capabilities = capabilities
        self._decoder = decoder
        self._weights = weights
        self.adapter = adapter
        """What versions must be of. None: the whole model."""
        self._deliver = deliver
        self._calls: Calls = queue.SimpleQueue() if calls is None else calls
        self._waiting: AdmissionQueue[Job] = AdmissionQueue()
        self._jobs: dict[str, Job] = {}
        self._seen = SeenRequests()
        self._scores: list[tuple[ScoreRequest, Stream]] = []
        self._manifest: Manifest | None = None
        self._drain: _Drain | None = None
        self._outgoing: list[tuple[Stream, Streamed]] = []
        self._flushed_s = 0.0
        self._was_busy = False

    def turn(self) -> bool:
        """Answer calls, then one step of everything that runs. False: nothing did, so only a call can change that."""
        while not self._calls.empty():
            self._calls.get()()
        self._finish_drain()
        pinned_only = self._drain is not None
        while (job := self._waiting.first(pinned_only)) is not None and self._decoder.can_start(job):
            self._decoder.start(job)
            self._waiting.pop(pinned_only)
        busy = bool(self._decoder.jobs or self._scores)
        for slot in self._decoder.step(self._weights.live):
            self._end(slot)
        if self._scores:
            self._answer_score(*self._scores.pop(0))
        self._flush()
        if not busy and self._was_busy:
            self._decoder.check()
        self._was_busy = busy
        return busy

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the loop's thread at the next token boundary. The only method for other threads."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, who raises it
                answer.set_exception(error)

        self._calls.put(run)
        return answer

    # Calls ---------------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[GenerateRequest | ScoreRequest], stream: Stream) -> None:
        """Queue requests. Everything further arrives in `stream`, refusals of single ones included."""
        for request in requests:
            try:
                if isinstance(request, GenerateRequest):
                    self._queue_generation(request, stream)
                else:
                    self._queue_scoring(request, stream)
            except EngineRefusedError as error:
                failure = Failure(kind=FailureKind.REFUSED, reason=error.reason)
                self._outgoing.append((stream, RequestFailure(request_id=request.request_id, failure=failure)))

    def _queue_generation(self, request: GenerateRequest, stream: Stream) -> None:
        serving = self._serving()
        self._refuse(why_not_generate(request, self._capabilities, self._decoder.vocab_size))
        self._refuse(why_not_version(request, serving))
        if request.request_id in self._seen or request.request_id in self._jobs:
            raise self._refusal(f"request {request.request_id} was sent before; a generation is never started twice")
        pinned = None if request.pinned is None else self._weights.pin(request.pinned)
        if request.pinned is not None and pinned is None:
            raise self._refusal(not_held(request.pinned, serving))
        job = Job(request=request, stream=stream, arrived_s=time.monotonic(), pinned=pinned)
        self._seen.add(request.request_id)
        self._jobs[request.request_id] = job
        self._waiting.push(job)

    def _queue_scoring(self, request: ScoreRequest, stream: Stream) -> None:
        """It is computed between two decode steps."""
        self._serving()
        self._refuse(why_not_score(request, self._capabilities, self._decoder.vocab_size))
        self._scores.append((request, stream))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End generations with what they have. Unknown and ended ones are ignored."""
        self._abort([self._jobs[request_id] for request_id in request_ids if request_id in self._jobs])

    def abandon(self, stream: Stream) -> None:
        """Nobody reads `stream` any more: end its requests."""
        self._scores = [(request, its) for request, its in self._scores if its is not stream]
        self._abort([job for job in self._jobs.values() if job.stream is stream])

    def take_staging(self) -> WeightSet:
        """Memory to receive a version in. What was staged before is forgotten."""
        if self._drain is not None:
            raise self._refusal(f"the commit of {self._drain.version.name} is draining; wait for it or roll back")
        return self._weights.take_staging()

    @property
    def held(self) -> Held | None:
        """What serves. None: nothing yet."""
        live = self._weights.live
        return Held(version=live.version, tensors=live.tensors) if live.version else None

    def received(self, weights: WeightSet, manifest: Manifest) -> None:
        """The version lies in `weights`: it is staged."""
        weights.version = manifest.version
        self._weights.staged = weights
        self._manifest = manifest

    def staged(self) -> tuple[WeightSet, Manifest]:
        """What is staged. Raises `EngineRefusedError` when nothing is."""
        if self._weights.staged is None or self._manifest is None:
            raise self._refusal("nothing is staged; stage a version first")
        return self._weights.staged, self._manifest

    def verified(self, weights: WeightSet, digest: str) -> None:
        """This root digest was read back from `weights`."""
        weights.digest = digest

    def give_back(self, weights: WeightSet) -> None:
        """Receiving failed."""
        self._weights.give_back(weights)

    def commit(self, version: PolicyVersion, mode: InFlightMode) -> Future[CommitReport]:
        """Serve what is staged, now or (drain) when what runs has ended. Raises `EngineRefusedError`."""
        staged, manifest = self.staged()
        if self._drain is not None:
            raise self._refusal(f"the commit of {self._drain.version.name} is draining already")
        if staged.version != version:
            raise self._refusal(f"{version.name} is not what is staged; stage and verify it first")
        if why := why_another(self.adapter, manifest.adapter):
            raise self._refusal(f"{version.name} is not for this engine: {why}")
        if staged.digest != version.digest:
            raise self._refusal(
                f"{version.name} was not verified, or its digest was wrong ({staged.digest or 'none'}); stage it again"
            )
        answer: Future[CommitReport] = Future()
        answer.set_running_or_notify_cancel()
        if mode is InFlightMode.DRAIN:
            self._drain = _Drain(version=version, answer=answer)
        else:
            answer.set_result(self._switch(version, mode))
        return answer

    def withdraw(self, reason: str) -> None:
        """Give up a draining commit, if there is one: the old version goes on."""
        if self._drain is not None:
            self._drain.answer.set_exception(self._refusal(f"{self._drain.version.name} was not committed: {reason}"))
            self._drain = None

    def rollback(self) -> None:
        """Forget what is staged, a draining commit included."""
        self.withdraw("it was rolled back")
        self._weights.rollback()

    def status(self) -> EngineStatus:
        """A look at the engine."""
        staged = self._weights.staged
        running = len(self._decoder.jobs)
        return EngineStatus(
            engine=self._engine,
            version=self._weights.live.version,
            staged=staged.version if staged else None,
            running=running,
            queued=len(self._jobs) - running,
            capabilities=self._capabilities,
        )

    def _abort(self, jobs: Iterable[Job]) -> None:
        slots = {job.request.request_id: slot for slot, job in self._decoder.jobs.items()}
        for job in jobs:
            slot = slots.get(job.request.request_id)
            if slot is None:
                self._send_last(job, self._decoder.finish_waiting(job))
            else:
                self._end(slot, aborted=True)

    # The loop ------------------------------------------------------------------------------------------------------

    def _finish_drain(self) -> None:
        drain = self._drain
        if drain is not None and not any(job.pinned is None for job in self._decoder.jobs.values()):
            self._drain = None
            drain.answer.set_result(self._switch(drain.version, InFlightMode.DRAIN))

    def _switch(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        began_s = time.monotonic()
        running = sum(job.pinned is None for job in self._decoder.jobs.values())
        self._weights.commit()
        self._decoder.switch(self._weights.live, mode is InFlightMode.RECOMPUTE)
        return CommitReport(version=version, pause_s=time.monotonic() - began_s, running=running)

    def _answer_score(self, request: ScoreRequest, stream: Stream) -> None:
        scores, version = self._decoder.score(self._weights.live, request), self._serving()
        result = ScoreResult(logprobs=scores.logprobs, version=version, top=scores.top, others=scores.others)
        self._outgoing.append((stream, Scored(request_id=request.request_id, result=result)))

    def _flush(self) -> None:
        now_s = time.monotonic()
        if now_s - self._flushed_s >= max(_FLUSH_S, len(self._decoder.jobs) / _CHUNKS_PER_S):
            self._flushed_s = now_s
            for slot in self._decoder.unsent():
                self._outgoing.append((self._decoder.jobs[slot].stream, self._decoder.flush(slot)))
        if self._outgoing:
            self._deliver(self._outgoing)
            self._outgoing = []

    def _end(self, slot: int, aborted: bool = False) -> None:
        job = self._decoder.jobs[slot]
        self._send_last(job, self._decoder.finish(slot, aborted))

    def _send_last(self, job: Job, last: Streamed) -> None:
        job.ended = True
        del self._jobs[job.request.request_id]
        if job.pinned is not None:
            job.pinned.users -= 1
        self._outgoing.append((job.stream, last))

    # Refusals ------------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise self._refusal(reason)

    def _serving(self) -> PolicyVersion:
        if self._weights.live.version is None:
            raise self._refusal("it has no version yet; stage, verify and commit one first")
        return self._weights.live.version

    def _refusal(self, reason: str) -> EngineRefusedError:
        return EngineRefusedError(self._engine, reason)
