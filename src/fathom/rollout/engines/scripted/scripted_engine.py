"""The scripted engine: the whole port in one object, without torch, process or network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    DigestKind,
    EngineStatus,
    GenerateChunk,
    GenerateRequest,
    ReceivesInto,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.core.records.scores import IdScores
from fathom.rollout.engines.admission_queue import AdmissionQueue
from fathom.rollout.engines.refusals import not_held, why_not_generate, why_not_score, why_not_version
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.generation import Generation, tampered
from fathom.rollout.engines.scripted.script import Script
from fathom.rollout.engines.seen_requests import SeenRequests
from fathom.rollout.engines.stop_strings import Decode

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds of the engine's clock."""

    start_s: float = 0.0
    """Before the first token of a generation."""
    token_s: float = 0.0
    """Before each token. 0: other tasks still get a turn."""
    stage_s: float = 0.0
    """Each of stage and verify."""
    chunk_tokens: int = 1
    """Tokens in a chunk."""
    deadline_s: float = 600.0
    """After which a call that hangs raises EngineTimeoutError."""


@final
class ScriptedEngine:
    """Says what its script says, at the pace and with the faults that it is given; versions switch as they should."""

    def __init__(
        self,
        script: Script,
        *,
        engine_id: str = "scripted",
        faults: Sequence[Fault] = (),
        pace: Pace | None = None,
        sleep: Sleep = asyncio.sleep,
        decode: Decode | None = None,
        max_running: int = 64,
        max_context_tokens: int = 4096,
    ) -> None:
        """`sleep` is real time by default; hand `ScriptedClock().sleep` for time that passes when a test says so.
        `decode` makes text, for stop strings; without it the engine does not have them."""
        self.requests: list[GenerateRequest] = []
        """Every generation asked for, in order of arrival, refused ones included."""
        self.calls: list[Call] = []
        """Every call, in order of arrival."""
        self._id = EngineId(engine_id)
        self._script = script
        self._faults = [(fault, Counter[str]()) for fault in faults]
        self._pace = pace or Pace()
        self._sleep = sleep
        self._max_running = max_running
        self._decode = decode
        self._capabilities = _capabilities(
            max_context_tokens, stop_strings=decode is not None, ids_scored=script.knows_distributions
        )
        self._version: PolicyVersion | None = None
        self._pinned_last: PolicyVersion | None = None
        self._staged: Manifest | None = None
        self._verified: str | None = None
        self._form: dict[str, tuple[str, tuple[int, ...]]] | None = None
        self._waiting: AdmissionQueue[Generation] = AdmissionQueue()
        self._generations: dict[str, Generation] = {}
        self._seen = SeenRequests()
        self._prefixes: set[tuple[int, bytes]] = set()
        self._draining: asyncio.Future[None] | None = None
        self._dead = asyncio.Event()

    @property
    def id(self) -> EngineId:
        """See `Engine.id`."""
        return self._id

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._capabilities

    def inject(self, fault: Fault) -> None:
        """From now on this goes wrong, too."""
        self._faults.append((fault, Counter()))

    def die(self) -> None:
        """Every call, those under way included, raises EngineDeadError from now on."""
        self._dead.set()
        for generation in self._generations.values():
            generation.turn.set()
        if self._draining is not None and not self._draining.done():
            self._draining.set_exception(self._death())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See `Engine.generate`."""
        self.requests.append(request)
        fault = self._find_fault(Call.GENERATE, request.request_id)
        if fault is not None and fault.trouble is Trouble.REFUSES:
            raise self._refusal("the script says no")
        generation = self._accept(request)
        try:
            self._admit()
            await generation.turn.wait()
            await self._sleep(self._pace.start_s)
            while not (generation.finish or generation.aborted):
                await self._sleep(self._pace.token_s)
                if fault is not None and generation.sampled >= fault.after_tokens:
                    await self._happen(fault.trouble)
                self._require_alive()
                if not generation.aborted:
                    self._step(generation)
                if generation.unsent >= self._pace.chunk_tokens and generation.finish is None:
                    yield tampered(generation.chunk(self._id, None), fault, generation.sampled)
            last = generation.chunk(self._id, FinishReason.ABORTED if generation.aborted else generation.finish)
            if fault is not None and fault.trouble is Trouble.BREAKS_OFF:
                raise EngineError(self._id, "the stream broke off before its end")
            yield tampered(last, fault, generation.sampled)
            if fault is not None and fault.trouble is Trouble.ENDS_TWICE:
                yield last
        finally:
            self._leave(generation)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._require_alive()
        if generation := self._generations.get(request_id):
            generation.aborted = True
            generation.turn.set()

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See `Engine.score`."""
        fault = await self._call(Call.SCORE)
        version = self._serving()
        self._refuse(why_not_score(request, self._capabilities, self._script.vocab_size))
        logprobs = self._script.score(request, version)
        if fault is not None and fault.trouble is Trouble.ONE_LOGPROB_FEWER:
            logprobs = logprobs[:-1]
        if fault is not None and fault.trouble in (Trouble.NAN_LOGPROB, Trouble.POSITIVE_LOGPROB):
            logprobs[-1] = np.nan if fault.trouble is Trouble.NAN_LOGPROB else 1.0
        if not request.top and request.others is None:
            return ScoreResult(logprobs=logprobs, version=version)
        rows, others = self._script.distributions(request, version), request.others
        return ScoreResult(
            logprobs=logprobs,
            version=version,
            top=IdScores.likeliest(rows, request.top) if request.top else None,
            others=None if others is None else rows[others.places, others.ids],
        )

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """See `Engine.stage`. No byte is read; the first manifest says which tensors there are."""
        await self._call(Call.STAGE)
        self._staged, self._verified = None, None
        await self._sleep(self._pace.stage_s)
        form = {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors}
        self._form = self._form or form
        if wrong := sorted(name for name in form | self._form if form.get(name) != self._form.get(name)):
            raise self._refusal(f"{manifest.version.name} does not fit: missing, unknown or misshapen {wrong}")
        self._staged = manifest
        return StageReport(
            size_bytes=manifest.size_bytes, moved_bytes=manifest.size_bytes, receive_s=self._pace.stage_s
        )

    async def verify(self) -> VerifyReport:
        """See `Engine.verify`."""
        fault = await self._call(Call.VERIFY)
        await self._sleep(self._pace.stage_s)
        version = self._require_staged().version
        wrong = fault is not None and fault.trouble is Trouble.WRONG_DIGEST
        self._verified = "0" * 64 if wrong else version.digest
        return VerifyReport(digest=self._verified, kind=DigestKind.MEMORY, verify_s=self._pace.stage_s)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """See `Engine.commit`."""
        await self._call(Call.COMMIT)
        if self._draining is not None:
            raise self._refusal("another commit is draining")
        if self._require_staged().version != version or self._verified != version.digest:
            raise self._refusal(f"{version.name} is not what is staged and verified")
        try:
            if mode is InFlightMode.DRAIN:
                await self._drained()
            return self._switch(version, mode)
        finally:
            self._draining = None
            self._admit()

    async def rollback(self) -> None:
        """See `Engine.rollback`."""
        await self._call(Call.ROLLBACK)
        self._staged = None
        if self._draining is not None and not self._draining.done():
            self._draining.set_exception(self._refusal("the commit was rolled back"))

    async def status(self) -> EngineStatus:
        """See `Engine.status`."""
        await self._call(Call.STATUS)
        running = sum(generation.started for generation in self._generations.values())
        return EngineStatus(
            engine=self._id,
            version=self._version,
            staged=self._staged.version if self._staged else None,
            running=running,
            queued=len(self._generations) - running,
            capabilities=self._capabilities,
        )

    async def health(self) -> None:
        """See `Engine.health`."""
        await self._call(Call.STATUS)

    async def close(self) -> None:
        """See `Engine.close`."""
        self.die()

    # Generations ---------------------------------------------------------------------------------------------------

    def _accept(self, request: GenerateRequest) -> Generation:
        self.calls.append(Call.GENERATE)
        self._require_alive(may_have_begun=False)
        live = self._serving()
        self._refuse(why_not_generate(request, self._capabilities, self._script.vocab_size))
        self._refuse(why_not_version(request, live))
        if request.request_id in self._seen or request.request_id in self._generations:
            raise self._refusal(f"request {request.request_id} was sent before; a generation is never started twice")
        in_use = [each.request.pinned for each in self._generations.values()]
        if request.pinned is not None and request.pinned not in (live, self._pinned_last, *in_use):
            raise self._refusal(not_held(request.pinned, live))
        self._pinned_last = request.pinned or self._pinned_last
        self._seen.add(request.request_id)
        generation = Generation(request, self._capabilities.max_context_tokens, self._decode)
        self._generations[request.request_id] = generation
        self._waiting.push(generation)
        return generation

    def _admit(self) -> None:
        """Let waiting generations run while there is room."""
        if self._dead.is_set() or self._version is None:
            return
        running = sum(generation.started for generation in self._generations.values())
        while running < self._max_running:
            generation = self._waiting.pop(pinned_only=self._draining is not None)
            if generation is None:
                return
            version = generation.request.pinned or self._version
            prefix = (version.number, generation.request.prompt_ids.tobytes())
            generation.start(version, cached=prefix in self._prefixes)
            self._prefixes.add(prefix)
            running += 1

    def _step(self, generation: Generation) -> None:
        version = generation.request.pinned or self._serving()
        said = self._script.next_token(generation.request, generation.context, version)
        if isinstance(said, FinishReason):
            generation.finish = said
        else:
            generation.append(said, version)

    def _leave(self, generation: Generation) -> None:
        generation.aborted = True
        self._generations.pop(generation.request.request_id, None)
        draining = self._draining
        if draining is not None and not draining.done() and not self._running_live():
            draining.set_result(None)
        self._admit()

    def _running_live(self) -> bool:
        return any(each.started and each.request.pinned is None for each in self._generations.values())

    async def _drained(self) -> None:
        """Return when nothing runs that follows the live version; nothing of the kind starts meanwhile."""
        self._draining = asyncio.get_running_loop().create_future()
        if self._running_live():
            await self._draining

    def _switch(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        following = [each for each in self._generations.values() if each.started and each.request.pinned is None]
        self._version, self._staged = version, None
        self._prefixes.clear()
        if mode is InFlightMode.RECOMPUTE:
            for generation in following:
                generation.recompute(version)
        return CommitReport(version=version, pause_s=0.0, running=len(following))

    # Faults --------------------------------------------------------------------------------------------------------

    async def _call(self, call: Call) -> Fault | None:
        self.calls.append(call)
        self._require_alive()
        fault = self._find_fault(call, None)
        if fault is not None:
            await self._happen(fault.trouble)
        return fault

    def _find_fault(self, call: Call, request_id: str | None) -> Fault | None:
        for fault, met in self._faults:
            fits = fault.call is call and fault.request_id in (None, request_id)
            if fits and (fault.times is None or met.total() < fault.times):
                met[call] += 1
                return fault
        return None

    async def _happen(self, trouble: Trouble) -> None:
        if trouble is Trouble.REFUSES:
            raise self._refusal("the script says no")
        if trouble is Trouble.FAILS:
            raise EngineError(self._id, "the script says that this fails")
        if trouble is Trouble.HANGS:
            await self._hang()
            self._require_alive()
            raise EngineTimeoutError(self._id, f"no answer within {self._pace.deadline_s:g} s")
        if trouble is Trouble.DIES:
            self.die()
            self._require_alive()

    async def _hang(self) -> None:
        """Until the deadline of the call, or the engine's death."""
        ends = [asyncio.ensure_future(self._sleep(self._pace.deadline_s)), asyncio.ensure_future(self._dead.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def _require_alive(self, *, may_have_begun: bool = True) -> None:
        if self._dead.is_set():
            raise self._death(may_have_begun=may_have_begun)

    def _death(self, *, may_have_begun: bool = True) -> EngineDeadError:
        log = "(a scripted engine keeps no log)"
        return EngineDeadError(self._id, "has ended", log, may_have_begun=may_have_begun)

    def _require_staged(self) -> Manifest:
        if self._staged is None:
            raise self._refusal("nothing is staged; stage a version first")
        return self._staged

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise self._refusal(reason)

    def _serving(self) -> PolicyVersion:
        if self._version is None:
            raise self._refusal("it has no version yet; stage, verify and commit one first")
        return self._version

    def _refusal(self, reason: str) -> EngineRefusedError:
        return EngineRefusedError(self._id, reason)


def _capabilities(max_context_tokens: int, stop_strings: bool, ids_scored: bool) -> Capabilities:
    return Capabilities(
        kept_sets=True,
        routes=False,
        kv_versions=True,
        raw_logprobs=True,
        barriers=True,
        pinned_versions=True,
        double_buffered=True,
        receives_into=ReceivesInto.STAGING,
        in_flight=frozenset(InFlightMode),
        transports=frozenset({"shared", "disk", "delta"}),
        digest=DigestKind.MEMORY,
        max_context_tokens=max_context_tokens,
        logit_bias=True,
        stop_strings=stop_strings,
        ids_scored=ids_scored,
    )
