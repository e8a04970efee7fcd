"""The engine port over HTTP to the embedded engine's process."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar, final

import httpx
import msgspec

from fathom.core.errors import (
    ConfigError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    RecordError,
    TransferInterruptedError,
)
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    EngineStatus,
    GenerateChunk,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.records.sampling import InFlightMode
from fathom.core.wire import FrameReader, frame
from fathom.rollout.engines.embedded.messages import (
    AbortCall,
    CommitCall,
    Done,
    Failure,
    FailureKind,
    RollbackCall,
    StageCall,
    StatusCall,
    VerifyCall,
    adapter_path,
)
from fathom.rollout.engines.embedded.multiplexer import Multiplexer, require_frames
from fathom.rollout.engines.embedded.process import EmbeddedSpec, EngineProcess, Reach

Answer = TypeVar("Answer", bound=msgspec.Struct)
_KEEP_IDLE_S = 5.0
_ERRORS = {
    FailureKind.REFUSED: EngineRefusedError,
    FailureKind.INTERRUPTED: TransferInterruptedError,
    FailureKind.FAILED: EngineError,
}
_CONNECT_S = 10.0
"""Deadline of a connection. Whatever fails before there is one has not begun."""
_MARGIN_S = 5.0
"""What a call may take beyond a deadline that the engine itself keeps."""

Wire = Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport]
"""Wraps what carries the calls."""


Leave = Callable[[], Awaitable[None]]
"""Gives up the process behind an engine, or a share of it. Idempotent."""


def _plain(transport: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
    return transport


@final
class EmbeddedEngine:
    """Owns the process that it started, or its share of one.

    Calls in flight are limited by nothing but open files; each has a deadline.
    """

    def __init__(self, reach: Reach, process: EngineProcess | None, wire: Wire, leave: Leave | None = None) -> None:
        """See `launch`, `share` and `attach`."""
        self._process = process
        self._leave = process.close if leave is None and process is not None else leave
        self._reach = reach
        self._capabilities = None if process is None else process.capabilities
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_IDLE_S)
        self._http = httpx.AsyncClient(
            base_url=reach.url,
            headers={"authorization": f"Bearer {reach.token}"},
            transport=wire(httpx.AsyncHTTPTransport(limits=limits, trust_env=False)),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # every call has a deadline of its own, where it is made
            trust_env=False,
        )
        self._multiplexer = Multiplexer(self._http, self._abort)

    @classmethod
    async def launch(cls, spec: EmbeddedSpec, wire: Wire = _plain) -> Self:
        """Start the process and wait until it is healthy. See `EngineProcess.launch` for what it raises.

        `wire` may wrap the HTTP to the process, e.g. by `FaultyWire`.
        """
        process = await EngineProcess.launch(spec)
        return cls(process.reach, process, wire)

    @classmethod
    def share(cls, process: EngineProcess, spec: EmbeddedSpec, leave: Leave) -> Self:
        """One adapter's engine, the one that `spec` names, in a process that others use, too.

        `leave` is called when this is closed; the process goes on.
        """
        assert spec.adapter is not None, "what shares a process computes with an adapter"
        reach = replace(
            process.reach,
            url=process.url + adapter_path(spec.adapter.name),
            weights_timeout_s=spec.weights_timeout_s,
            request_timeout_s=spec.request_timeout_s,
        )
        return cls(reach, process, _plain, leave)

    @classmethod
    async def attach(cls, url: str, token: str) -> Self:
        """Speak to an engine that somebody else started, and that goes on when this is closed.

        Raises:
            ConfigError: this is no URL.
            EngineError: it does not answer, or the token is not its own.
        """
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is no URL of an engine; give one like http://127.0.0.1:8000")
        engine = cls(Reach(engine=EngineId(url), url=url, token=token), None, _plain)
        try:
            status = await engine.status()
        except BaseException:
            await engine.close()
            raise
        engine._capabilities = status.capabilities
        engine._reach = replace(engine._reach, engine=status.engine)
        return engine

    @property
    def id(self) -> EngineId:
        """See `Engine.id`."""
        return self._reach.engine

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        assert self._capabilities is not None, "it has not said yet what it can do"
        return self._capabilities

    @property
    def process(self) -> EngineProcess | None:
        """The process behind it. None: somebody else started it."""
        return self._process

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See `Engine.generate`. Requests of the same moment travel together; each has its own deadline and end."""
        deadline = _Deadline("generate", self._reach.request_timeout_s)
        reply = self._multiplexer.start(request)
        try:
            while True:
                async with self._boundary(deadline):
                    chunk: GenerateChunk = self._checked(await reply.next())
                yield chunk
                if chunk.end is not None:
                    return
        finally:
            self._multiplexer.leave(reply)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        await self._abort((request_id,))

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See `Engine.score`. Travels like a generation."""
        deadline = _Deadline("score", self._reach.request_timeout_s)
        reply = self._multiplexer.start(request)
        try:
            async with self._boundary(deadline):
                return self._checked(await reply.next())
        finally:
            self._multiplexer.leave(reply)

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """See `Engine.stage`."""
        call = StageCall(manifest=manifest, source=source)
        return await self._call("stage", call, StageReport, self._reach.weights_timeout_s)

    async def verify(self) -> VerifyReport:
        """See `Engine.verify`."""
        return await self._call("verify", VerifyCall(), VerifyReport, self._reach.weights_timeout_s)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """See `Engine.commit`. A drain that misses the deadline is withdrawn: the old version goes on."""
        deadline_s = self._reach.weights_timeout_s
        call = CommitCall(version=version, mode=mode, deadline_s=deadline_s)
        return await self._call("commit", call, CommitReport, deadline_s + _MARGIN_S)

    async def rollback(self) -> None:
        """See `Engine.rollback`."""
        await self._call("rollback", RollbackCall(), Done, self._reach.weights_timeout_s)

    async def status(self) -> EngineStatus:
        """See `Engine.status`."""
        return await self._call("status", StatusCall(), EngineStatus, self._reach.call_timeout_s)

    async def health(self) -> None:
        """See `Engine.health`: its decode loop answers, not only its HTTP."""
        await self.status()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._leave is not None:
            await self._leave()
        await self._multiplexer.close()
        await self._http.aclose()

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        await self._call("abort", AbortCall(request_ids=request_ids), Done, self._reach.call_timeout_s)

    async def _call(self, name: str, call: msgspec.Struct, kind: type[Answer], timeout_s: float) -> Answer:
        async with self._boundary(_Deadline(name, timeout_s)):
            response = await self._http.post(f"/{name}", content=frame(call))
            require_frames(response)
            (record,) = FrameReader(kind | Failure).feed(response.content)
            return self._checked(record)

    def _checked(self, record: Any) -> Any:
        """The record, unless it is the engine's refusal or failure."""
        if isinstance(record, Failure):
            raise _ERRORS[record.kind](self.id, record.reason)
        return record

    @asynccontextmanager
    async def _boundary(self, deadline: _Deadline) -> AsyncGenerator[None]:
        """Everything that may go wrong between the two processes becomes an `EngineError` here."""
        try:
            async with asyncio.timeout_at(deadline.at):
                yield
        except TimeoutError as error:
            raise EngineTimeoutError(self.id, f"{deadline.name} took more than {deadline.timeout_s:g} s") from error
        except (httpx.TransportError, RecordError, ValueError) as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if self._process is not None and await self._process.ended():
                raise self._process.death(f"ended during {deadline.name}", may_have_begun=sent) from error
            reason = f"{deadline.name} failed: {type(error).__name__}: {error}{_advice(error)}"
            raise EngineError(self.id, reason, may_have_begun=sent) from error


@final
class _Deadline:
    """When a call must have ended."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.at = asyncio.get_running_loop().time() + timeout_s


def _advice(error: Exception) -> str:
    """What to do about a full table of open files: no limit on connections is by design."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            return "; raise the limit of open files (ulimit -n) or lower rollout.max_in_flight"
        cause = cause.__cause__ or cause.__context__
    return ""
