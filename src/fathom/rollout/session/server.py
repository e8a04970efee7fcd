"""HTTP for agents: the APIs that they know, one session for each API key.

Authorization: Bearer KEY, or x-api-key: KEY     POST /v1/chat/completions    POST /v1/messages
or in the path: /s/KEY/v1/...                    POST /v1/responses           GET  /v1/models
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fathom.core.errors import ConfigError
from fathom.core.ports.agent import Endpoint
from fathom.rollout.session.call import CallRefusedError, Refusal
from fathom.rollout.session.dialects.chat_completions import ChatCompletions
from fathom.rollout.session.dialects.dialect import Dialect, Terms
from fathom.rollout.session.dialects.messages import Messages
from fathom.rollout.session.dialects.responses import Responses
from fathom.rollout.session.reply import JSON, Reply, refused
from fathom.rollout.session.session import Session
from fathom.rollout.session.sessions import Sessions

_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
_KEEP_ALIVE_S = 60
_END_S = 2.0
"""How long replies on their way may take when the server is closed."""
_LOOK_S = 5.0
"""How often idle sessions are looked for."""


@final
class SessionServer:
    """Serves sessions in the event loop that starts it."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        ignored: frozenset[str] = frozenset(),
        max_body_bytes: int = 16 * 2**20,
    ) -> None:
        """Nothing listens yet.

        Args:
            sessions: who is served. Every request needs the key of one.
            model: what the model is called.
            host: address to listen at.
            port: 0: any free one.
            ignored: parameters to leave out of requests though they would change the answer, e.g. `temperature`.
            max_body_bytes: longest body of a request that is read.
        """
        self._sessions = sessions
        self._model = model
        self._host = host
        self._port = port
        self._ignored = ignored
        self._max_body_bytes = max_body_bytes
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port cannot be used."""
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        settings = uvicorn.Config(
            self.app(),
            lifespan="off",
            log_level="error",
            access_log=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_END_S),
        )
        self._server = _Server(settings)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if serving.done():
                raise ConfigError(f"the session server did not start on {self._host}; see its log")
        self._tasks = [serving, asyncio.create_task(self._expire())]

    async def close(self) -> None:
        """Answer no more. Sessions stay as they are."""
        if self._server is None:
            return
        self._server.should_exit = True
        serving, expiring = self._tasks
        expiring.cancel()
        done, _ = await asyncio.wait({serving}, timeout=2 * _END_S)
        if not done:
            serving.cancel()
        await asyncio.gather(serving, expiring, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """Without a path. For OpenAI's clients add `/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def endpoint(self, key: str) -> Endpoint:
        """What an agent is told."""
        return Endpoint(base_url=self.base_url, key=key, model=self._model)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route(f"{prefix}/v1/models", self._models, methods=["GET"]) for prefix in ("", "/s/{key}")]
        routes += [
            Route(f"{prefix}{path}", self._answer, methods=["POST"])
            for prefix in ("", "/s/{key}")
            for path in _DIALECTS
        ]
        return Starlette(routes=routes, exception_handlers={404: _unknown_path, 405: _unknown_path})

    async def _answer(self, http: Request) -> ASGIApp:
        dialect = _dialect(http.url.path)
        try:
            session = self._session(http)
            terms = Terms(sampling=session.plan.sampling, ignored=self._ignored)
            asked = dialect.read(await self._body(http), terms, session.history)
        except CallRefusedError as error:
            return refused(dialect, error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        return Reply(dialect, asked, session, http.headers)

    async def _models(self, http: Request) -> ASGIApp:
        try:
            self._session(http)
        except CallRefusedError as error:
            return refused(ChatCompletions(), error)
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "fathom",
            "type": "model",
            "display_name": self._model,
            "created_at": "1970-01-01T00:00:00Z",
        }
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": self._model, "last_id": self._model}
        return Response(msgspec.json.encode(listed), media_type=JSON)

    def _session(self, http: Request) -> Session:
        """By the key in the path, else in the headers. Some harnesses set both headers, one of them to nothing."""
        bearer = http.headers.get("authorization", "")
        keys = [
            http.path_params.get("key", ""),
            bearer[7:].strip() if bearer[:7].lower() == "bearer " else "",
            http.headers.get("x-api-key", "").strip(),
        ]
        key = next((key for key in keys if key), None)
        if key is None:
            raise CallRefusedError(
                Refusal.UNKNOWN_KEY,
                "the request carries no API key; send the session's as `Authorization: Bearer` or as `x-api-key`",
            )
        return self._sessions.get(key)

    async def _body(self, http: Request) -> bytes:
        parts, size = list[bytes](), 0
        async for part in http.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise CallRefusedError(
                    Refusal.TOO_LARGE, f"the body has more than {self._max_body_bytes} bytes; shorten the messages"
                )
            parts.append(part)
        return b"".join(parts)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._sessions.expire()


@final
class _Server(uvicorn.Server):
    """Leaves the signals of the process to the run that it is part of."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """See `uvicorn.Server`; there is no other way to say so."""
        yield


def _dialect(path: str) -> Dialect:
    return next((dialect for end, dialect in _DIALECTS.items() if path.endswith(end)), ChatCompletions())


async def _unknown_path(http: Request, error: Exception) -> Response:
    dialect = Messages() if "anthropic-version" in http.headers else ChatCompletions()
    reason = f"{http.method} {http.url.path} is not served; there are POST {', '.join(_DIALECTS)} and GET /v1/models"
    return refused(dialect, CallRefusedError(Refusal.UNKNOWN_PATH, reason))


def _listen(host: str, port: int) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on for every connection, and an event waits 40 ms for the next.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} on {host} cannot be used ({error}); choose another, or 0 for any") from error
    return listener
