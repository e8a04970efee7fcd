"""The one thread that makes all calls to a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, final

from torch import Tensor

from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.faults import Faults
from fathom.sync.phase import asked_to_stop
from fathom.sync.transports.transport import Transport

T = TypeVar("T")


@final
class TransportThread:
    """Calls a transport in order, each call under a deadline: what outlives its own is ended before the next begins."""

    def __init__(self, transport: Transport, timeout_s: float, faults: Faults) -> None:
        """`faults` reaches `hold` and `offer`, each `.before` and `.after`."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._faults = faults
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transport")

    async def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """See `Transport.hold`. Raises `DeliveryError` or `PayloadError`, whatever the transport raises."""
        await self._call("hold", manifest.version, lambda: self._transport.hold(manifest, tensors))

    async def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> WeightSource:
        """See `Transport.offer`. Raises `DeliveryError` or `PayloadError`, whatever the transport raises."""
        return await self._call("offer", version, lambda: self._transport.offer(version, engines))

    def release(self, version: PolicyVersion) -> None:
        """See `Transport.release`. Done after what is under way; once closed there is nothing to release."""
        if not self._closed:
            self._thread.submit(self._transport.release, version)

    async def close(self) -> None:
        """Close the transport when nothing is under way. Idempotent.

        Raises:
            DeliveryError: a call is stuck; what the transport keeps was not removed.
        """
        self._closed = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(self._thread.shutdown)
        except TimeoutError as error:
            raise DeliveryError("a write of weights is stuck: look at the medium, then end the process") from error
        self._transport.close()

    async def _call(self, name: str, version: PolicyVersion, call: Callable[[], T]) -> T:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                await self._faults.reach(f"{name}.before")
                answer = await asyncio.get_running_loop().run_in_executor(self._thread, call)
                await self._faults.reach(f"{name}.after")
                return answer
        except (DeliveryError, PayloadError):
            raise
        except asyncio.CancelledError as error:
            if asked_to_stop():
                raise
            raise DeliveryError(f"the transport could not {name} {version.name}: it was cancelled inside") from error
        except Exception as error:  # the boundary: whatever a transport raises, the version was not delivered
            if deadline.expired():
                raise DeliveryError(
                    f"the transport did not {name} {version.name} within {self._timeout_s:g} s; "
                    "look at the medium, or raise sync.timeout_s"
                ) from error
            reason = f"{type(error).__name__}: {error}"
            raise DeliveryError(f"the transport could not {name} {version.name}: {reason}") from error
