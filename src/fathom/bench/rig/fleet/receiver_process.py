"""A receiver in a process of its own, as the publisher sees it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, final

import msgspec

from fathom.bench.rig.fleet.messages import (
    Answer,
    CloseCall,
    OpenCall,
    Opened,
    RawCloseCall,
    RawJoinCall,
    RawOpenCall,
    RawOpened,
    RawReceiveCall,
    RawReceived,
    TensorForm,
)
from fathom.bench.rig.fleet.pipe import FramePipe
from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError, TransferInterruptedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import Capabilities, CommitReport, ScoreRequest, ScoreResult, StageReport, VerifyReport
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.embedded.messages import (
    CommitCall,
    Done,
    Failure,
    FailureKind,
    RollbackCall,
    StageCall,
    VerifyCall,
)
from fathom.rollout.engines.embedded.process import last_lines

_MODULE = "fathom.bench.rig.fleet.serve"
_END_S = 5.0
_ERRORS: dict[FailureKind, type[EngineError]] = {
    FailureKind.REFUSED: EngineRefusedError,
    FailureKind.INTERRUPTED: TransferInterruptedError,
    FailureKind.FAILED: EngineError,
}
Kind = TypeVar("Kind", bound=msgspec.Struct)


@final
class ReceiverProcess:
    """A `Receiver` whose memory is elsewhere. One call at a time; one that is given up ends the process."""

    def __init__(self, engine: EngineId, process: subprocess.Popen[bytes], log: Path, host: str) -> None:
        self.host = host
        """Address of the machine (or namespace) it runs on."""
        self._id = engine
        self._process = process
        self._log = log
        self._opened: Capabilities | None = None
        self._turn = asyncio.Lock()
        self._ended = False
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the process has pipes")
        self._pipe = FramePipe(process.stdout.fileno(), process.stdin.fileno(), Answer)

    @classmethod
    def launch(cls, engine: EngineId, folder: Path, *, prefix: Sequence[str] = (), host: str = "127.0.0.1") -> Self:
        """Start it. `prefix` comes before its command line, e.g. to enter a network namespace. Its log: in `folder`."""
        log_path = folder / f"{engine}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", _MODULE, engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=quiet_environment(),
            )
        return cls(engine, process, log_path, host)

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        return self._id

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. Known once it is open."""
        if self._opened is None:
            raise AssertionError("a receiver is opened before it is asked")
        return self._opened

    async def open(
        self, forms: Sequence[TensorForm], *, shards: int = 1, storage_bytes_per_s: float | None = None
    ) -> None:
        """Begin to receive tensors of these forms, holding nothing. See `OpenCall`."""
        call = OpenCall(forms=tuple(forms), shards=shards, storage_bytes_per_s=storage_bytes_per_s)
        self._opened = (await self._call(call, Opened)).capabilities

    async def drop(self) -> None:
        """Give its memory back."""
        await self._call(CloseCall(), Done)

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """See `Receiver.stage`."""
        return await self._call(StageCall(manifest=manifest, source=source), StageReport)

    async def verify(self) -> VerifyReport:
        """See `Receiver.verify`."""
        return await self._call(VerifyCall(), VerifyReport)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """See `Receiver.commit`."""
        return await self._call(CommitCall(version=version, mode=mode, deadline_s=_END_S), CommitReport)

    async def rollback(self) -> None:
        """See `Receiver.rollback`."""
        await self._call(RollbackCall(), Done)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: it holds tensors, not a model."""
        raise EngineRefusedError(self._id, "it has no model to score with")

    async def raw_open(self, call: RawOpenCall) -> bytes:
        """Make a raw buffer ready; returns its address."""
        return (await self._call(call, RawOpened)).address

    async def raw_join(self) -> None:
        """See `RawReceiver.join`."""
        await self._call(RawJoinCall(), Done)

    async def raw_receive(self) -> RawReceived:
        """See `RawReceiver.receive`."""
        return await self._call(RawReceiveCall(), RawReceived)

    async def raw_close(self) -> None:
        """See `RawReceiver.close`."""
        await self._call(RawCloseCall(), Done)

    async def close(self) -> None:
        """End the process, in the middle of a call too. Idempotent."""
        await asyncio.shield(asyncio.to_thread(self._end))

    async def _call(self, call: msgspec.Struct, kind: type[Kind]) -> Kind:
        """Raises EngineError, of the kind that the process says."""
        async with self._turn:
            try:
                answer = await asyncio.to_thread(self._exchange, call)
            except asyncio.CancelledError:
                self._process.kill()  # its answer would be taken for the next call's
                raise
        match answer:
            case None:
                raise EngineDeadError(self._id, f"ended during {type(call).__name__}", last_lines(self._log))
            case Failure():
                raise _ERRORS[answer.kind](self._id, answer.reason)
            case _ if isinstance(answer, kind):
                return answer
            case _:
                raise EngineError(self._id, f"answered {type(call).__name__} by {type(answer).__name__}")

    def _exchange(self, call: msgspec.Struct) -> Any:
        """None: the process has ended."""
        if self._ended:
            return None
        try:
            self._pipe.write(call)
        except BrokenPipeError:
            return None
        return self._pipe.read()

    def _end(self) -> None:
        self._ended = True
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def quiet_environment() -> dict[str, str]:
    """One thread for torch, and libraries that say no more than they must."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **QUIET}


QUIET = {"NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR"}
"""What quietens transfer libraries, where it is set before they are loaded."""
