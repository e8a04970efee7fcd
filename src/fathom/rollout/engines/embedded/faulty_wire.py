"""Faults on demand between a real engine and its client: for tests of everything around an engine."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import final

import httpx

from fathom.core.manifest import Manifest, SharedMemorySource
from fathom.core.wire import FrameReader, frame
from fathom.rollout.engines.embedded.messages import StageCall


class WireFault(StrEnum):
    """What goes wrong."""

    ANSWERS_500 = "answers_500"
    """Every call is answered by HTTP 500, and never reaches the engine."""
    WRONG_TENSOR = "wrong_tensor"
    """The next version is staged from a copy in which one bit of one tensor differs; then nothing more goes wrong."""


@final
class FaultyWire(httpx.AsyncBaseTransport):
    """Wraps the client's HTTP: `EmbeddedEngine.launch(spec, FaultyWire)`. Does nothing until `fault` is set."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.fault: WireFault | None = None
        self.met = 0
        """Calls that went wrong."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Hand the call on, unless something is to go wrong with it."""
        if self.fault is WireFault.ANSWERS_500:
            self.met += 1
            return httpx.Response(500, text="Internal Server Error")
        if self.fault is WireFault.WRONG_TENSOR and request.url.path == "/stage":
            self.met += 1
            self.fault = None
            return await self._stage_a_copy(request)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """See `httpx.AsyncBaseTransport`."""
        await self._inner.aclose()

    async def _stage_a_copy(self, request: httpx.Request) -> httpx.Response:
        (call,) = FrameReader(StageCall).feed(await request.aread())
        source = call.source
        if not isinstance(source, SharedMemorySource):
            raise AssertionError("a wrong tensor is made of weights in shared memory only")
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(_one_bit_differs(source, call.manifest))
            copy.flush()
            content = frame(StageCall(manifest=call.manifest, source=SharedMemorySource(path=copy.name)))
            headers = [(key, value) for key, value in request.headers.raw if key.lower() != b"content-length"]
            return await self._inner.handle_async_request(
                httpx.Request(request.method, request.url, headers=headers, content=content)
            )


def _one_bit_differs(source: SharedMemorySource, manifest: Manifest) -> bytearray:
    content = bytearray(Path(source.path).read_bytes())
    content[manifest.tensors[len(manifest.tensors) // 2].offset] ^= 1
    return content
