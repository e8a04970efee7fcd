"""vLLM's HTTP interface, call by call. Nothing here knows about versions or requests of Fathom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, final

import httpx
import msgspec

from fathom.core.errors import EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import EngineId
from fathom.rollout.engines.vllm.launch.process import VllmProcess
from fathom.rollout.engines.vllm.wire import Answer, Facts, StagedFacts, StageOrder

T = TypeVar("T")
_KEEP_IDLE_S = 4.0
_OK = 200
_DATA, _DONE = b"data: ", b"[DONE]"
_PREFIX = "generate-tokens-"
"""What the server puts before the id of a request."""


@final
class VllmServer:
    """A server that answers. Calls in flight are limited by nothing but open files; each has a deadline."""

    def __init__(self, engine: EngineId, url: str, token: str, process: VllmProcess | None) -> None:
        """`process` is None where the server was not started here."""
        self.engine = engine
        self.url = url
        self._process = process
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_IDLE_S),
            timeout=None,  # every call has a deadline of its own, set where it is made
            trust_env=False,
        )

    @property
    def pid(self) -> int | None:
        """Process id of what was started here. None: nothing was."""
        return self._process.pid if self._process is not None else None

    @asynccontextmanager
    async def boundary(self, name: str, timeout_s: float) -> AsyncGenerator[None]:
        """Everything that may go wrong between the two processes becomes an `EngineError` here."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise EngineTimeoutError(self.engine, f"{name} took more than {timeout_s:g} s") from error
        except (httpx.TransportError, msgspec.MsgspecError) as error:
            if self._process is not None and await self._process.ended():
                raise self._process.death(f"ended during {name}") from error
            raise EngineError(self.engine, f"{name} failed: {type(error).__name__}: {error}") from error

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        """Events of one generation, without those that say nothing. Raises `EngineError` on an answer that is one."""
        async with self._http.stream("POST", "/inference/v1/generate", json=body) as response:
            if response.status_code != _OK:
                raise self._failure("generate", response.status_code, await response.aread())
            rest = b""
            async for data in response.aiter_raw():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA) and not line.startswith(_DONE, len(_DATA)):
                        answer = msgspec.json.decode(line[len(_DATA) :], type=Answer)
                        if answer.error is not None:
                            raise self._failure("generate", answer.error.code or 500, line[len(_DATA) :])
                        yield answer

    async def answer(self, body: dict[str, Any]) -> Answer:
        """The whole answer to one generation."""
        response = await self._http.post("/inference/v1/generate", json=body)
        return msgspec.json.decode(self._checked("generate", response), type=Answer)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End generations early. Unknown ids are ignored."""
        await self._post("/abort_requests", json={"request_ids": [_PREFIX + name for name in request_ids]})

    async def pause(self) -> None:
        """Freeze everything that runs or waits, until `resume`."""
        await self._post("/pause", params={"mode": "keep"})

    async def paused(self) -> bool:
        """Whether it is frozen."""
        response = await self._http.get("/is_paused")
        return msgspec.json.decode(self._checked("is_paused", response), type=dict[str, bool])["is_paused"]

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def load_staged(self, digest: str, label: str) -> None:
        """Replace the weights by those staged. It must be paused: between the first and the last call it has none."""
        await self._post("/start_weight_update")
        await self._post("/update_weights", json={"update_info": {"digest": digest}})
        await self._post("/finish_weight_update", json={"weight_version": label})

    async def reset_prefix_cache(self, *, running: bool) -> None:
        """Forget keys and values that nobody reads; with `running`, also those of what runs, to be computed again."""
        await self._post("/reset_prefix_cache", params={"reset_running_requests": running})

    async def prepare(self) -> Facts:
        """Hook the worker and learn what it is. Raises `EngineError` when it does not have the extension."""
        return await self._worker("fathom_prepare", Facts)

    async def stage(self, order: StageOrder) -> None:
        """Tell the worker to begin to receive a version. It refuses while it still receives another."""
        await self._worker("fathom_stage", None, msgspec.to_builtins(order))

    async def staged(self) -> StagedFacts:
        """How far that is."""
        return await self._worker("fathom_staged", StagedFacts)

    async def forget(self) -> None:
        """Nothing is staged any more. What is being received ends soon: until then it is `busy`."""
        await self._worker("fathom_forget", None)

    async def close(self) -> None:
        """End the process, if it was started here. Idempotent."""
        if self._process is not None:
            await self._process.close()
        await self._http.aclose()

    async def _worker(self, method: str, kind: type[T] | None, arguments: dict[str, Any] | None = None) -> T:
        content = await self._post("/collective_rpc", json={"method": method, "kwargs": arguments or {}})
        results = msgspec.json.decode(content)["results"]
        return msgspec.convert(results[0], kind)

    async def _post(self, path: str, **parts: Any) -> bytes:
        return self._checked(path[1:], await self._http.post(path, **parts))

    def _checked(self, name: str, response: httpx.Response) -> bytes:
        if response.status_code != _OK:
            raise self._failure(name, response.status_code, response.content)
        return response.content

    def _failure(self, name: str, status: int, content: bytes) -> EngineError:
        try:
            error = msgspec.json.decode(content, type=Answer).error
            reason = error.message if error is not None else content.decode(errors="replace")
        except msgspec.MsgspecError:
            reason = content.decode(errors="replace")
        kind = EngineRefusedError if status in (400, 404, 422) else EngineError
        return kind(self.engine, f"{name} answered {status}: {reason[:_SHOWN]}; see the server's log")


_SHOWN = 500
