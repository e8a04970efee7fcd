"""The engine's side of every transport: bytes of a version into the engine's own staging tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import final

from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.ids import EngineId
from fathom.core.manifest import (
    BroadcastSource,
    DeltaSource,
    DiskSource,
    Manifest,
    PeerSource,
    SharedMemorySource,
    TensorFormat,
    WeightSource,
)
from fathom.core.ports.faults import Faults, NoFaults
from fathom.sync.held import Held, check_adapter, check_fit
from fathom.sync.quantise.formats import check_known
from fathom.sync.transports.broadcast.seat import Seat
from fathom.sync.transports.delta import DeltaReading
from fathom.sync.transports.disk import read_disk
from fathom.sync.transports.p2p.landing import Landing
from fathom.sync.transports.reception import Reception
from fathom.sync.transports.shared import read_shared

_NO_FAULTS = NoFaults()
_PLAIN: Mapping[str, TensorFormat] = {}


@final
class Inbox:
    """Receives versions for one engine, one at a time. Keeps what is dear to set up from one to the next."""

    def __init__(
        self,
        engine: EngineId,
        faults: Faults = _NO_FAULTS,
        formats: Mapping[str, TensorFormat] = _PLAIN,
        adapter: AdapterIdentity | None = None,
    ) -> None:
        """`faults` reaches `receive.before` and `receive.after`. `formats`: how the engine's tensors are coded, by
        name. `adapter`: what the engine's tensors are of; None: a whole model."""
        self._engine = engine
        self._formats = formats
        self._adapter = adapter
        self._faults = faults
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inbox")
        self._seat = Seat(engine)
        self._deltas = DeltaReading()
        self._landing = Landing(engine)

    async def receive(
        self, manifest: Manifest, source: WeightSource, into: Mapping[str, Tensor], serving: Held | None
    ) -> int:
        """Overwrite `into` (contiguous, any device) with the version in `source`; returns the bytes that travelled.

        A thread does it. When this raises or is cancelled, `into` may hold anything and must not serve, but nothing
        writes there any more. What arrived is proven by `digest(into)` later.

        Args:
            manifest: what has to arrive.
            source: where it is.
            into: the engine's tensors.
            serving: what serves meanwhile. None: nothing, or `into` is its memory.

        Raises:
            PayloadError: it is of another adapter or base; or a tensor, which is named, is missing, unknown, of another
                shape, element type or format, or the source cannot be read as the manifest says. Nothing was written
                when identity, names or forms do not fit.
            TransferInterruptedError: the transfer broke elsewhere.
        """
        check_adapter(manifest, self._adapter)
        check_fit(manifest, into)
        check_known(manifest, self._formats)
        reception = Reception(engine=self._engine, manifest=manifest, into=into, serving=serving)
        await self._faults.reach("receive.before")
        moved_bytes = await self._in_thread(source, reception)
        await self._faults.reach("receive.after")
        return moved_bytes

    def close(self) -> None:
        """Let go of what was kept, once nothing is received any more. It receives nothing afterwards. Idempotent."""
        self._thread.shutdown()
        self._seat.close()
        self._landing.close()

    async def _in_thread(self, source: WeightSource, reception: Reception) -> int:
        loop = asyncio.get_running_loop()  # its own threads are few, and some receptions wait for one another
        reading = loop.run_in_executor(self._thread, self._read, source, reception)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            reception.given_up.set()
            await asyncio.wait([reading])  # a late write would spoil what is staged next
            raise

    def _read(self, source: WeightSource, reception: Reception) -> int:
        match source:
            case SharedMemorySource():
                return read_shared(source, reception)
            case DiskSource():
                return read_disk(source, reception)
            case BroadcastSource():
                return self._seat.receive(source, reception)
            case DeltaSource():
                return self._deltas.read(source, reception)
            case PeerSource():
                return self._landing.read(source, reception)
