"""The process of one receiver: `python -m fathom.bench.rig.fleet.serve NAME`.

It answers frames from standard input, one after the other, until that closes or whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import final

import numpy as np
import torch

from fathom.bench.rig.fleet.made_up import tensor_parallel
from fathom.bench.rig.fleet.messages import (
    Answer,
    Call,
    CloseCall,
    OpenCall,
    Opened,
    RawCloseCall,
    RawJoinCall,
    RawOpenCall,
    RawOpened,
    RawReceiveCall,
    RawReceived,
)
from fathom.bench.rig.fleet.pipe import FramePipe
from fathom.bench.rig.fleet.raw.link import RawReceiver, open_receiver
from fathom.bench.rig.throttled_files import make_known
from fathom.core.errors import EngineRefusedError, PayloadError, TransferInterruptedError
from fathom.core.ids import EngineId
from fathom.core.manifest import DiskSource
from fathom.core.ports.engine import StageReport
from fathom.rollout.engines.embedded.messages import (
    CommitCall,
    Done,
    Failure,
    FailureKind,
    RollbackCall,
    StageCall,
    VerifyCall,
)
from fathom.sync.digest import DTYPE_NAMES
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.transports.p2p.sharded_receiver import ShardedReceiver

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_WATCH_S = 0.5


@final
class ReceiverServer:
    """One receiver, and one raw buffer, or neither."""

    def __init__(self, name: EngineId) -> None:
        self._name = name
        self._receiver: MemoryReceiver | ShardedReceiver | None = None
        self._storage_bytes_per_s: float | None = None
        self._buffer = np.empty(0, np.uint8)
        self._raw: RawReceiver | None = None

    async def answer(self, call: Call) -> Answer:
        """Do it; what goes wrong is an answer too."""
        try:
            return await self._answer(call)
        except (PayloadError, EngineRefusedError) as error:
            return Failure(kind=FailureKind.REFUSED, reason=str(error))
        except TransferInterruptedError as error:
            return Failure(kind=FailureKind.INTERRUPTED, reason=error.reason)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever is raised, it is this receiver that failed
            return Failure(kind=FailureKind.FAILED, reason=f"{type(error).__name__}: {error}")

    async def _answer(self, call: Call) -> Answer:
        match call:
            case OpenCall():
                return self._open(call)
            case CloseCall():
                self._close()
            case StageCall():
                return await self._stage(call)
            case VerifyCall():
                return await self._opened().verify()
            case CommitCall():
                return await self._opened().commit(call.version, call.mode)
            case RollbackCall():
                await self._opened().rollback()
            case RawOpenCall():
                self._buffer = np.ones(call.size_bytes, np.uint8)
                self._raw = open_receiver(call, self._buffer)
                return RawOpened(address=self._raw.address)
            case RawJoinCall():
                await asyncio.to_thread(self._linked().join)
            case RawReceiveCall():
                await asyncio.to_thread(self._linked().receive)
                return RawReceived(first=int(self._buffer[0]), last=int(self._buffer[-1]))
            case RawCloseCall():
                self._linked().close()
                self._raw, self._buffer = None, np.empty(0, np.uint8)
        return Done()

    def _open(self, call: OpenCall) -> Opened:
        self._close()
        template = {form.name: torch.empty(form.shape, dtype=_DTYPES[form.dtype]) for form in call.forms}
        if call.shards == 1:
            self._receiver = MemoryReceiver(self._name, template)
        else:
            self._receiver = ShardedReceiver(self._name, template, tensor_parallel(call.forms, call.shards))
        self._storage_bytes_per_s = call.storage_bytes_per_s
        return Opened(capabilities=self._receiver.capabilities)

    def _close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    async def _stage(self, call: StageCall) -> StageReport:
        report = await self._opened().stage(call.manifest, call.source)
        if self._storage_bytes_per_s is not None and isinstance(call.source, DiskSource):
            await asyncio.to_thread(time.sleep, report.moved_bytes / self._storage_bytes_per_s)
        return report

    def _opened(self) -> MemoryReceiver | ShardedReceiver:
        if self._receiver is None:
            raise AssertionError("a receiver is opened before it is used")
        return self._receiver

    def _linked(self) -> RawReceiver:
        if self._raw is None:
            raise AssertionError("a raw buffer is opened before it is used")
        return self._raw


async def _serve(name: EngineId, pipe: FramePipe) -> None:
    server = ReceiverServer(name)
    while (call := await asyncio.to_thread(pipe.read)) is not None:
        pipe.write(await server.answer(call))


def _end_with_parent(parent: int) -> None:
    """Even in the middle of a transfer that nobody ends."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(0)


def main() -> None:
    """Serve until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    make_known()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print belongs to the log
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_serve(EngineId(sys.argv[1]), FramePipe(sys.stdin.fileno(), answers, Call)))


if __name__ == "__main__":
    main()
