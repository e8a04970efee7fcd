"""The engine's HTTP surface: one POST for many generations and scorings, one for each other call of the port."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar, final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fathom.core.errors import (
    EngineRefusedError,
    FathomError,
    PayloadError,
    RecordError,
    TransferInterruptedError,
)
from fathom.core.ids import EngineId
from fathom.core.ports.engine import (
    CommitReport,
    DigestKind,
    EngineStatus,
    StageReport,
    VerifyReport,
)
from fathom.core.wire import FrameReader, frame
from fathom.rollout.engines.embedded.messages import (
    FRAMES,
    AbortCall,
    CommitCall,
    Done,
    Failure,
    FailureKind,
    RollbackCall,
    StageCall,
    StatusCall,
    SubmitCall,
    VerifyCall,
)
from fathom.rollout.engines.embedded.server.job import Stream
from fathom.rollout.engines.embedded.server.scheduler import Scheduler
from fathom.rollout.engines.embedded.server.streaming import Streaming
from fathom.sync.digest import digest, wrong_tensors
from fathom.sync.transports.inbox import Inbox

T = TypeVar("T")
Call = TypeVar("Call", bound=msgspec.Struct)


def application(apis: Mapping[str, EngineApi], token: str) -> ASGIApp:
    """The ASGI application; every request must carry the bearer token.

    Args:
        apis: by the path that each is below. Empty: it is at the root.
        token: the bearer token.
    """
    routes = [route for path, api in apis.items() for route in _below(path, api.routes())]
    return _Guarded(Starlette(routes=routes), token)


def _below(path: str, routes: list[BaseRoute]) -> list[BaseRoute]:
    return [Mount(path, routes=routes)] if path else routes


@final
class EngineApi:
    """Answers calls by handing them to the scheduler; bytes are received and digested in threads meanwhile."""

    def __init__(self, scheduler: Scheduler, engine: EngineId, threads: int) -> None:
        self._scheduler = scheduler
        self._inbox = Inbox(engine, adapter=scheduler.adapter)
        self._threads = threads
        self._publishing = asyncio.Lock()

    def routes(self) -> list[BaseRoute]:
        """One for each call."""
        return [
            Route("/submit", self._submit, methods=["POST"]),
            _route("/abort", AbortCall, self._abort),
            _route("/stage", StageCall, self._stage),
            _route("/verify", VerifyCall, self._verify),
            _route("/commit", CommitCall, self._commit),
            _route("/rollback", RollbackCall, self._rollback),
            _route("/status", StatusCall, self._status),
        ]

    async def _submit(self, http: Request) -> ASGIApp:
        stream: Stream = asyncio.Queue()
        try:
            call = _read(SubmitCall, await http.body())
            await self._on_loop(lambda: self._scheduler.submit(call.requests, stream))
        except FathomError as error:
            return _failed(error)
        scheduler = self._scheduler
        return Streaming(stream, len(call.requests), lambda: scheduler.call(lambda: scheduler.abandon(stream)))

    async def _abort(self, call: AbortCall) -> Done:
        await self._on_loop(lambda: self._scheduler.abort(call.request_ids))
        return Done()

    async def _stage(self, call: StageCall) -> StageReport:
        # Not interrupted when the caller goes away: a thread writes into memory that must not be given out again.
        return await asyncio.shield(self._receive(call))

    async def _receive(self, call: StageCall) -> StageReport:
        began_s = time.monotonic()
        async with self._publishing:
            weights, serving = await self._on_loop(lambda: (self._scheduler.take_staging(), self._scheduler.held))
            try:
                moved_bytes = await self._inbox.receive(call.manifest, call.source, weights.tensors, serving)
            except BaseException:
                self._scheduler.call(lambda: self._scheduler.give_back(weights))
                raise
            await self._on_loop(lambda: self._scheduler.received(weights, call.manifest))
        return StageReport(
            size_bytes=call.manifest.size_bytes, moved_bytes=moved_bytes, receive_s=time.monotonic() - began_s
        )

    async def _verify(self, call: VerifyCall) -> VerifyReport:
        began_s = time.monotonic()
        async with self._publishing:
            weights, manifest = await self._on_loop(self._scheduler.staged)
            found = await asyncio.to_thread(digest, weights.tensors, threads=self._threads)
            right = found == manifest.version.digest
            wrong = () if right else await asyncio.to_thread(wrong_tensors, manifest, weights.tensors)
            await self._on_loop(lambda: self._scheduler.verified(weights, found))
        return VerifyReport(digest=found, kind=DigestKind.MEMORY, verify_s=time.monotonic() - began_s, wrong=wrong)

    async def _commit(self, call: CommitCall) -> CommitReport:
        answer = await self._on_loop(lambda: self._scheduler.commit(call.version, call.mode))
        report = asyncio.wrap_future(answer)
        try:
            done, _ = await asyncio.wait({report}, timeout=call.deadline_s)
        except asyncio.CancelledError:
            self._scheduler.call(lambda: self._scheduler.withdraw("its caller went away"))
            raise
        if not done:
            await self._on_loop(lambda: self._scheduler.withdraw(f"draining took more than {call.deadline_s:g} s"))
        return await report

    async def _rollback(self, call: RollbackCall) -> Done:
        await self._on_loop(lambda: self._scheduler.withdraw("it was rolled back"))
        async with self._publishing:
            await self._on_loop(self._scheduler.rollback)
        return Done()

    async def _status(self, call: StatusCall) -> EngineStatus:
        return await self._on_loop(self._scheduler.status)

    async def _on_loop(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(function))


@final
class _Guarded:
    """Lets requests with the right bearer token through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"") if scope["type"] == "http" else b""
        if not hmac.compare_digest(given, self._expected):
            refused = Failure(kind=FailureKind.REFUSED, reason="the access token is missing or wrong")
            await Response(frame(refused), 401, media_type=FRAMES)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _route(path: str, kind: type[Call], answer: Callable[[Call], Awaitable[msgspec.Struct]]) -> Route:
    """One call of the port: a frame in, a frame out. A caller that goes away cancels the answer."""

    async def endpoint(http: Request) -> Response:
        try:
            call = _read(kind, await http.body())
            return Response(frame(await _unless_gone(answer(call), http)), media_type=FRAMES)
        except Exception as error:  # noqa: BLE001 - the boundary: the caller gets a typed failure
            return _failed(error)

    return Route(path, endpoint, methods=["POST"])


async def _unless_gone(answer: Awaitable[T], http: Request) -> T:
    answering, gone = asyncio.ensure_future(answer), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
        return await answering
    finally:
        gone.cancel()


def _read(kind: type[Call], body: bytes) -> Call:
    records = FrameReader(kind).feed(body)
    if len(records) != 1:
        raise RecordError(f"the body holds {len(records)} records, not one {kind.__name__}")
    return records[0]


def _failed(error: Exception) -> Response:
    if isinstance(error, EngineRefusedError | PayloadError):
        reason = error.reason if isinstance(error, EngineRefusedError) else str(error)
        return Response(frame(Failure(kind=FailureKind.REFUSED, reason=reason)), 409, media_type=FRAMES)
    if isinstance(error, TransferInterruptedError):
        interrupted = Failure(kind=FailureKind.INTERRUPTED, reason=error.reason)
        return Response(frame(interrupted), 503, media_type=FRAMES)
    traceback.print_exception(error)
    reason = f"{type(error).__name__}: {error}"
    return Response(frame(Failure(kind=FailureKind.FAILED, reason=reason)), 500, media_type=FRAMES)
