"""Broadcast between processes: members that are killed or stopped half-way, and a trainer of several ranks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import UserDict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from fathom.config.families import TransportKind
from fathom.config.sync import BroadcastConfig, SyncConfig
from fathom.core.errors import TransferInterruptedError
from fathom.core.ids import EngineId
from fathom.core.manifest import BroadcastSource, Manifest
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, digest
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.shards import Box, Shard
from fathom.sync.transports.broadcast.gathering import GatheredSource, serve_shards
from fathom.sync.transports.broadcast.transport import BroadcastTransport
from fathom.sync.transports.inbox import Inbox

A, B = EngineId("a"), EngineId("b")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fathom.run.local"])  # torch is imported once for all of them

MB = 1 << 20


def large(megabytes: int) -> dict[str, torch.Tensor]:
    """More than the kernel's socket buffers hold."""
    return {f"{number:02}": torch.full((MB // 4,), float(number)) for number in range(megabytes)}


class Trap(UserDict):
    """Tensors; the thread that asks for a certain one ends or stops the process."""

    def __init__(self, tensors, name, number):
        super().__init__(tensors)
        self.name, self.number = name, number

    def __getitem__(self, name):
        if name == self.name and threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), self.number)
        return super().__getitem__(name)


def engine_process(name: EngineId, pipe: Connection, size: int, trap: signal.Signals | None) -> None:
    """Receive what is offered through the pipe, and answer with the digest; with a trap, the first time is the last."""
    inbox, into = Inbox(name), {key: torch.zeros_like(tensor) for key, tensor in large(size).items()}
    places = into if trap is None else Trap(into, "05", trap)
    pipe.send("started")
    while (order := pipe.recv()) is not None:
        manifest, source = order
        try:
            asyncio.run(inbox.receive(manifest, source, places, None))
            pipe.send(digest(into))
        except TransferInterruptedError as error:
            pipe.send(f"interrupted: {error.reason}")
    inbox.close()


class Remote:
    """An engine in a process of its own."""

    def __init__(self, name: EngineId, size: int, trap: signal.Signals | None = None) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=engine_process, args=(name, theirs, size, trap))
        self.process.start()
        theirs.close()
        assert self.answer() == "started"  # what follows has short deadlines

    def order(self, manifest: Manifest, source: BroadcastSource) -> None:
        self.pipe.send((manifest, source))

    def answer(self) -> str:
        assert self.pipe.poll(30), "no answer"
        return self.pipe.recv()

    def end(self) -> int | None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(20)
        return self.process.exitcode


@pytest.mark.parametrize("trap", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_stalls_half_way_holds_the_others_up_for_a_moment_only(trap):
    size = 32
    tensors = large(size)
    transport = BroadcastTransport(BroadcastConfig(bucket_mb=1, stall_s=2.0))
    manifest = build_manifest(0, 1, None, tensors)
    transport.hold(manifest, tensors)
    well, ill = Remote(A, size), Remote(B, size, trap)
    try:
        source = transport.offer(manifest.version, [A, B])
        well.order(manifest, source)
        ill.order(manifest, source)
        assert well.answer().startswith("interrupted: the broadcast broke off")
        well.order(manifest, transport.offer(manifest.version, [A]))
        assert well.answer() == manifest.version.digest
    finally:
        transport.close()
        ill.process.kill()
        ill.process.join()
        assert well.end() == 0


# A trainer of three ranks: rank 0 and 1 are a first pipeline stage (tensor-parallel in dimension 1, one tensor held by
# both), rank 2 and 0 share an FSDP tensor in dimension 0, rank 2 holds the second stage.

SHAPES = {"embed": (3000, 512), "head": (4096, 300), "norm": (77,), "q": (512, 16_000), "scale": ()}


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def box(*bounds: tuple[int, int]) -> Box:
    return Box(bounds)


LAYOUT = (
    (Shard("embed", box((0, 1100), (0, 512))), Shard("norm", box((0, 77))), Shard("q", box((0, 512), (0, 5333)))),
    (Shard("norm", box((0, 77))), Shard("q", box((0, 512), (5333, 16_000)))),
    (Shard("embed", box((1100, 3000), (0, 512))), Shard("head", box((0, 4096), (0, 300))), Shard("scale", box())),
)


def shards_of(rank: int) -> dict[Shard, torch.Tensor]:
    state = whole_state()
    return {shard: state[shard.name][shard.box.slices].contiguous() for shard in LAYOUT[rank]}


def trainer_group(store: TCPStore, rank: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=20)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    return ProcessGroupGloo(PrefixStore("trainer", store), rank, len(LAYOUT), options)


def trainer_process(rank: int, port: int, manifest: Manifest) -> None:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    serve_shards(manifest, LAYOUT, shards_of(rank), trainer_group(store, rank), 0, MB)


def sharded_receiver(name: EngineId, pipe: Connection) -> None:
    inbox, into = Inbox(name), {key: torch.zeros_like(tensor) for key, tensor in whole_state().items()}
    manifest, source = pipe.recv()
    asyncio.run(inbox.receive(manifest, source, into, None))
    pipe.send(digest(into))
    inbox.close()


def memory_bytes(key: str) -> int:
    """Of this process: `VmRSS` now, `VmHWM` at its peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return 1024 * int(line.split()[1])


@pytest.mark.slow
def test_a_sharded_state_is_gathered_bucket_by_bucket_and_never_whole():
    state = whole_state()
    manifest = build_manifest(0, 1, None, state)
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    pipes = [_CONTEXT.Pipe() for _ in (A, B)]
    processes = [
        *(_CONTEXT.Process(target=trainer_process, args=(rank, store.port, manifest)) for rank in (1, 2)),
        *(_CONTEXT.Process(target=sharded_receiver, args=(n, end)) for n, (_, end) in zip((A, B), pipes, strict=True)),
    ]
    for process in processes:
        process.start()
    source = GatheredSource(manifest, LAYOUT, shards_of(0), trainer_group(store, 0), 0, MB, within_s=20.0)
    assert source.buffer_bytes == 3 * MB < manifest.size_bytes / 2
    transport = BroadcastTransport(BroadcastConfig(bucket_mb=1, stall_s=20.0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    try:
        transport.hold_source(manifest, source, torch.device("cpu"))
        offered = transport.offer(manifest.version, [A, B])
        for mine, _ in pipes:
            mine.send((manifest, offered))
        assert [mine.recv() for mine, _ in pipes] == [manifest.version.digest] * 2
    finally:
        transport.close()  # which tells the trainer's ranks to end
        for process in processes:
            process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    grown_bytes = memory_bytes("VmHWM") - before
    assert grown_bytes < manifest.size_bytes / 2, "the root held it whole"


@pytest.mark.slow
def test_a_publisher_leaves_out_an_engine_that_is_stopped_half_way():
    """The fleet of one engine in this process and one in another that is stopped for good."""
    size = 32

    class Proxy:
        """The other process behind the port, as far as a publication needs it."""

        def __init__(self, remote: Remote) -> None:
            self.id, self.remote = B, remote
            self.capabilities = MemoryReceiver(A, large(1)).capabilities

        async def stage(self, manifest, source):
            self.remote.order(manifest, source)
            await asyncio.to_thread(self.remote.pipe.poll, 2.5)
            raise RuntimeError("it did not answer")

    async def scenario():
        remote, well = Remote(B, size, signal.SIGSTOP), MemoryReceiver(A, large(size))
        config = BroadcastConfig(bucket_mb=1, stall_s=1.0)
        publisher = Publisher(
            [well, Proxy(remote)],
            BroadcastTransport(config),
            SyncConfig(transport=TransportKind.BROADCAST, broadcast=config, timeout_s=5.0),
        )
        started = time.monotonic()
        try:
            published = await publisher.publish(large(size), 0, 1, InFlightMode.CONTINUE)
        finally:
            remote.process.kill()
            remote.process.join()
            await publisher.close()
        assert published.committed == (A,)
        assert set(published.fenced) == {B}
        assert digest(well.weights) == published.version.digest
        assert time.monotonic() - started < 30

    asyncio.run(scenario())
