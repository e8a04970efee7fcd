"""Broadcast within one process: who takes part, what is kept, what happens when somebody does not come."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import UserDict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore

from fathom.config.families import CollectiveBackend, TransportKind
from fathom.config.sync import BroadcastConfig, SyncConfig
from fathom.core.errors import DeliveryError, EngineError, TransferInterruptedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import BroadcastSource, Manifest, TensorEntry
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, digest
from fathom.sync.faults.scripted_faults import Fault, FaultKind, ScriptedFaults
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.transports.broadcast.buckets import DIRECT_BYTES, plan_buckets
from fathom.sync.transports.broadcast.roll_call import Verdict, await_verdict
from fathom.sync.transports.broadcast.store import visit_store
from fathom.sync.transports.broadcast.transport import BroadcastTransport
from fathom.sync.transports.inbox import Inbox

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
SHORT = BroadcastConfig(bucket_mb=1, stall_s=1.5)
PATIENT = BroadcastConfig(bucket_mb=1, stall_s=20.0)


def model(number: int = 0) -> dict[str, torch.Tensor]:
    """A tensor of several buckets, one of a few, and small ones around them."""
    generator = torch.Generator().manual_seed(number)
    shapes = {"a": (3,), "b.large": (1025, 1030), "c": (), "d": (5, 7), "e.mid": (300_001,), "f": (0, 2), "g": (9,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def staging() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model().items()}


class World:
    """A transport and the inboxes of some engines."""

    def __init__(self, config: BroadcastConfig, *engines: EngineId) -> None:
        self.transport = BroadcastTransport(config)
        self.inboxes = {engine: Inbox(engine) for engine in engines}
        self.number = -1

    def hold(self):
        self.number += 1
        manifest = build_manifest(self.number, 1, None, model(self.number))
        self.transport.hold(manifest, model(self.number))
        return manifest

    async def deliver(self, manifest, *engines: EngineId, into=None):
        """What each engine got, or the error that it met."""
        source = self.transport.offer(manifest.version, engines)
        receiving = [self.receive(engine, manifest, source, into or staging()) for engine in engines]
        return source, await asyncio.gather(*receiving, return_exceptions=True)

    async def receive(self, engine: EngineId, manifest, source: BroadcastSource, into):
        moved_bytes = await self.inboxes[engine].receive(manifest, source, into, None)
        assert moved_bytes >= manifest.size_bytes
        return digest(into)

    def verdict(self, source: BroadcastSource) -> Verdict | None:
        """Read from the store, as an engine reads it."""
        store = visit_store(source.host, source.port).store
        return await_verdict(PrefixStore(source.transfer, store), 1.0, threading.Event())

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        for inbox in self.inboxes.values():
            inbox.close()


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 64, 200, 1000, DIRECT_BYTES - 1, DIRECT_BYTES]), min_size=1, max_size=12),
    bucket=st.sampled_from([64, 128, 4096, DIRECT_BYTES, 4 * DIRECT_BYTES]),
)
def test_buckets_cover_every_byte_once_in_order_and_large_tensors_alone(sizes, bucket):
    bucket = max(bucket, sum(sizes) // 500 // 64 * 64)
    entries, offset = [], 0
    for number, size in enumerate(sizes):
        form = {"dtype": "U8", "shape": (size,), "offset": offset, "size_bytes": size, "checksum": ""}
        entries.append(TensorEntry(name=f"{number:02}", **form))
        offset += -(-size // 64) * 64
    version = PolicyVersion(incarnation=1, number=0, digest="")
    manifest = Manifest(version=version, parent=None, tensors=tuple(entries))
    buckets = plan_buckets(manifest, bucket)
    assert all(0 < each.size_bytes <= bucket for each in buckets)
    pieces = [piece for each in buckets for piece in each.pieces]
    for entry in manifest.tensors:
        mine = [piece for piece in pieces if piece.entry == entry]
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine)][: len(mine)]
        assert sum(piece.size_bytes for piece in mine) == entry.size_bytes
    flat = [
        (each.start + each.place(p).start, each.start + each.place(p).stop) for each in buckets for p in each.pieces
    ]
    assert flat == [(p.entry.offset + p.start, p.entry.offset + p.stop) for p in pieces]
    assert flat == sorted(flat)
    assert all(
        len(each.pieces) == 1 for each in buckets if any(p.entry.size_bytes >= DIRECT_BYTES for p in each.pieces)
    )


def test_a_bucket_that_would_cut_elements_is_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_buckets(build_manifest(0, 1, None, model()), 100)


def test_several_engines_get_version_after_version_in_one_group():
    async def scenario():
        with World(PATIENT, A, B, C) as world:
            for _ in range(4):
                manifest = world.hold()
                source, got = await world.deliver(manifest, A, B, C)
                assert got == [manifest.version.digest] * 3
                verdict = world.verdict(source)
                assert verdict.form == (manifest.version.number == 0), "the group was not kept"
                world.transport.release(manifest.version)

    asyncio.run(scenario())


def test_another_membership_or_a_new_process_makes_a_new_group_and_an_old_version_can_be_had_again():
    async def scenario():
        with World(PATIENT, A, B) as world:
            first, names = world.hold(), []
            for engines, anew in (((A, B), True), ((B,), True), ((A, B), True), ((A, B), False)):
                source, got = await world.deliver(first, *engines)
                assert set(got) == {first.version.digest}
                assert world.verdict(source).form == anew
                names.append(world.verdict(source).group)
            world.inboxes[B].close()
            world.inboxes[B] = Inbox(B)  # as after a restart: it holds no group
            world.hold()
            source, got = await world.deliver(first, A, B)
            assert set(got) == {first.version.digest}
            assert world.verdict(source).form
            assert len({*names, world.verdict(source).group}) == 4

    asyncio.run(scenario())


def test_one_that_does_not_come_is_named_and_the_others_go_on_without_it():
    async def scenario():
        with World(SHORT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A, B])
            with pytest.raises(TransferInterruptedError, match=r"b did not come within 1.5 s"):
                await world.receive(A, manifest, source, staging())
            with pytest.raises(TransferInterruptedError, match=r"b did not come"):
                await world.receive(B, manifest, source, staging())  # too late
            _, got = await world.deliver(manifest, A)
            assert got == [manifest.version.digest]

    asyncio.run(scenario())


class Door(UserDict):
    """Tensors of which one is given only after something has happened to whoever asks for it."""

    def __init__(self, name, happens):
        super().__init__(staging())
        self.name, self.happens = name, happens

    def __getitem__(self, name):
        if name == self.name and threading.current_thread() is not threading.main_thread():
            self.happens()
        return super().__getitem__(name)


def test_one_that_fails_half_way_breaks_it_for_the_others_who_say_so():
    class DiskFullError(Exception):
        pass

    def fail():
        raise DiskFullError

    async def scenario():
        with World(PATIENT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A, B])
            other = world.receive(A, manifest, source, staging())
            broken = world.receive(B, manifest, source, Door("b.large", fail))
            got = await asyncio.gather(other, broken, return_exceptions=True)
            assert [type(each) for each in got] == [TransferInterruptedError, DiskFullError]
            source, got = await world.deliver(manifest, A, B)
            assert set(got) == {manifest.version.digest}
            assert world.verdict(source).form

    asyncio.run(scenario())


def test_a_reception_that_is_cancelled_while_it_waits_for_others_ends_at_once():
    async def scenario():
        with World(PATIENT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A, B])
            waiting = asyncio.create_task(world.receive(A, manifest, source, staging()))
            await asyncio.sleep(0.05)
            waiting.cancel()
            async with asyncio.timeout(5):
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            late = asyncio.create_task(world.receive(B, manifest, source, staging()))
            await asyncio.sleep(0.05)
            assert not late.done(), "one that left was counted as present"
            world.transport.close()
            with pytest.raises(TransferInterruptedError):
                await late

    asyncio.run(scenario())


def test_once_cancelled_half_way_nothing_is_written_and_the_others_are_told():
    cancelled = threading.Event()

    async def scenario():
        with World(PATIENT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A, B])
            into = Door("e.mid", lambda: cancelled.wait(10))
            mine = asyncio.create_task(world.receive(A, manifest, source, into))
            other = asyncio.create_task(world.receive(B, manifest, source, staging()))
            await asyncio.sleep(0.1)
            mine.cancel()
            await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await mine
            after = digest(into.data)
            got = await asyncio.gather(other, return_exceptions=True)
            assert got == [manifest.version.digest] or isinstance(got[0], TransferInterruptedError)
            assert digest(into.data) == after
            _, got = await world.deliver(manifest, A, B)
            assert set(got) == {manifest.version.digest}

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["offer", "release", "close"])
def test_an_offer_that_still_waits_is_given_up(how):
    async def scenario():
        with World(PATIENT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A, B])
            waiting = asyncio.create_task(world.receive(A, manifest, source, staging()))
            await asyncio.sleep(0.05)
            match how:
                case "offer":
                    world.transport.offer(manifest.version, [B])
                case "release":
                    world.transport.release(manifest.version)
                case "close":
                    world.transport.close()
            async with asyncio.timeout(5):
                with pytest.raises(TransferInterruptedError):
                    await waiting
            if how != "offer":
                with pytest.raises(DeliveryError, match="not held"):
                    world.transport.offer(manifest.version, [A])

    asyncio.run(scenario())


def test_an_engine_that_an_offer_is_not_for_is_told_so():
    async def scenario():
        with World(SHORT, A, B) as world:
            manifest = world.hold()
            source = world.transport.offer(manifest.version, [A])
            with pytest.raises(EngineError, match=r"the offer is for \['a'\]"):
                await world.receive(B, manifest, source, staging())

    asyncio.run(scenario())


def test_nccl_without_gpus_is_refused_by_name():
    async def scenario():
        config = SHORT.model_copy(update={"backend": CollectiveBackend.NCCL})
        with World(config, A) as world:
            _, got = await world.deliver(world.hold(), A)
            assert isinstance(got[0], TransferInterruptedError)
            assert "set it to 'gloo'" in str(got[0])

    asyncio.run(scenario())


def listening() -> set[str]:
    """Local addresses (hex) at which this process listens."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            sockets.add(str(path.readlink()))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets}


def test_everything_listens_on_loopback_and_closing_leaves_no_port_and_no_thread():
    before = set(threading.enumerate())

    async def scenario():
        ports, tasks = listening(), len(os.listdir("/proc/self/task"))
        with World(PATIENT, A, B) as world:
            await world.deliver(world.hold(), A, B)
            opened = listening() - ports
            assert len(opened) == 4  # the store and three members
            assert {address.partition(":")[0] for address in opened} == {"0100007F"}  # 127.0.0.1
        world.transport.close()
        assert listening() == ports
        deadline = time.monotonic() + 5
        while len(os.listdir("/proc/self/task")) > tasks:
            assert time.monotonic() < deadline, "threads are left"
            time.sleep(0.01)

    asyncio.run(scenario())
    assert set(threading.enumerate()) == before


LEAVES = """
import asyncio, torch
from fathom.config.sync import BroadcastConfig
from fathom.sync.digest import build_manifest
from fathom.sync.transports.broadcast.transport import BroadcastTransport
from fathom.sync.transports.inbox import Inbox
tensors, into = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
transport, inbox, manifest = BroadcastTransport(BroadcastConfig()), Inbox("a"), build_manifest(0, 1, None, tensors)
transport.hold(manifest, tensors)
asyncio.run(inbox.receive(manifest, transport.offer(manifest.version, ["a"]), into, None))
assert into["w"].all()
"""


def test_an_interpreter_that_ends_with_a_group_open_ends_quietly():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


async def publish(publisher: Publisher, number: int):
    return await publisher.publish(model(number), number, 1, InFlightMode.CONTINUE)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.RAISE])
def test_a_publisher_delivers_to_the_rest_of_the_fleet(kind):
    """One hangs, or fails, before it receives: the others are interrupted and staged again without it."""

    async def scenario():
        faults = ScriptedFaults(Fault(place="receive.before", kind=kind, visit=1))
        engines = [MemoryReceiver(A, model()), MemoryReceiver(B, model(), faults), MemoryReceiver(C, model())]
        config = SyncConfig(transport=TransportKind.BROADCAST, broadcast=SHORT, timeout_s=4.0)
        publisher = Publisher(engines, BroadcastTransport(SHORT), config)
        try:
            assert (await publish(publisher, 0)).committed == (A, B, C)
            second = await publish(publisher, 1)
            assert second.committed == (A, C)
            assert set(second.fenced) == {B}
            assert second.moved_bytes >= 2 * second.size_bytes
            await publisher.restore(engines[1])
            third = await publish(publisher, 2)
            assert third.committed == (A, B, C)
            assert all(digest(engine.weights) == third.version.digest for engine in engines)
        finally:
            await publisher.close()

    asyncio.run(scenario())


def test_options_that_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"stall_s = 10 must be less than sync.timeout_s = 10"):
        SyncConfig(transport=TransportKind.BROADCAST, timeout_s=10.0)
    with pytest.raises(ValueError, match=r"changes nothing with sync.transport = 'disk'"):
        SyncConfig(transport=TransportKind.DISK, broadcast=BroadcastConfig())
    with pytest.raises(ValueError, match="name one of its addresses"):
        BroadcastConfig(host="0.0.0.0")
    transport = BroadcastTransport(BroadcastConfig(host="192.0.2.1"))
    manifest = build_manifest(0, 1, None, model())
    transport.hold(manifest, model())
    with pytest.raises(DeliveryError, match=r"set sync.broadcast.host"):
        transport.offer(manifest.version, [A])
