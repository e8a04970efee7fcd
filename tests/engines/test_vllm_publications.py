"""vLLM under many publications: it computes with what came last, to the bit, in whichever way it came."""

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import torch
from torch.distributed import PrefixStore
from vllm_rig import Answer, Bench, Reference, Weights, answers, make_spec, untied_folder

from fathom.config.families import TransportKind
from fathom.config.sync import BroadcastConfig, SyncConfig
from fathom.core.errors import (
    DeliveryError,
    EngineDeadError,
    EngineRefusedError,
    PayloadError,
    TransferInterruptedError,
)
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import BroadcastSource, Manifest, PeerSource, WeightSource
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.sync.digest import build_manifest
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS
from fathom.sync.transports.broadcast.group import form_gloo
from fathom.sync.transports.broadcast.roll_call import Present, await_verdict, say_present
from fathom.sync.transports.broadcast.store import visit_store
from fathom.sync.transports.broadcast.transport import BroadcastTransport
from fathom.sync.transports.transport import Transport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

KINDS = [TransportKind.SHARED, TransportKind.DISK, TransportKind.BROADCAST, TransportKind.DELTA]
PUBLICATIONS = 20
STALLS_SOON = BroadcastConfig(stall_s=2.0)
NUMBERS = itertools.count(100_000)


def walk(reference: Reference) -> list[Weights]:
    """As many versions as are published, each a few changes from the one before."""
    generator = torch.Generator().manual_seed(0)
    weights, found = reference.weights(), []
    for _ in range(PUBLICATIONS):
        for name, tensor in weights.items():
            moved = torch.rand(tensor.shape, generator=generator) < 0.05
            weights[name] = tensor + moved * 0.05 * torch.randn(tensor.shape, generator=generator)
        found.append(dict(weights))
    return found


@dataclass
class Course:
    """Versions for one server, and what a fresh one answers that was started on the last of them."""

    bench: Bench
    reference: Reference
    versions: list[Weights]
    fresh: list[Answer]

    async def run(self, kind: TransportKind, versions: list[Weights], tmp_path: Path) -> None:
        """Publish some of them, with generations between and one that goes on all along."""
        publisher, subject = make_publisher([self.bench.engine], kind, tmp_path), self.bench.subject
        try:
            sizes: list[int] = []
            for index, weights in enumerate(versions):
                number = next(NUMBERS)
                probe = await self.reference.probe(weights)
                publication = await publisher.publish(weights, number, 1, InFlightMode.CONTINUE, probe=probe)
                assert publication.committed == (self.bench.engine.id,), publication.fenced
                sizes.append(publication.moved_bytes)
                if index == 0:
                    running = await subject.begin(subject.request(new=150))
                if index % 6 == 0:
                    generated = await subject.run(subject.request(new=8, seed=number))
                    assert set(generated.policy_version.tolist()) == {number}
            assert (await running.finish()).end.finish_reason is FinishReason.LENGTH
        finally:
            await publisher.close()
        whole = publication.size_bytes
        if kind is TransportKind.DELTA:
            assert sizes[0] > whole / 2 > max(sizes[1:])
        else:
            assert all(whole <= size <= whole * 1.01 for size in sizes)


def make_publisher(engines: Sequence[VllmEngine], kind: TransportKind, tmp_path: Path) -> Publisher:
    config = SyncConfig(transport=kind)
    return Publisher(engines, TRANSPORTS[kind](tmp_path, config), config)


@dataclass
class Fresh:
    """A server that was started on a course's last version, and its answers before anything was published to it."""

    bench: Bench
    answers: list[Answer]


@pytest.fixture(scope="module")
def fresh_tied(vllm_bench: Bench, vllm_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """It would keep a stale head after a publication; it gets none before its answers are taken."""
    folder = tmp_path_factory.mktemp("fresh")
    reference = Reference(vllm_bench.folder)
    reference.save(walk(reference)[-1], folder)
    faults = ("stale_head", folder.name)
    with Bench.opened(make_spec(folder, tmp_path_factory.mktemp("run"), vllm_environment, faults)) as bench:
        yield Fresh(bench, bench.runner.run(answers(bench.engine)))


@pytest.fixture(scope="module")
def tied(vllm_bench: Bench, fresh_tied: Fresh) -> Course:
    reference = Reference(vllm_bench.folder)
    return Course(vllm_bench, reference, walk(reference), fresh_tied.answers)


@pytest.fixture(scope="module")
def untied(vllm_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    folder, last = untied_folder(tmp_path_factory.mktemp("untied")), tmp_path_factory.mktemp("fresh-untied")
    reference = Reference(folder)
    versions = walk(reference)
    reference.save(versions[-1], last)
    with Bench.opened(make_spec(last, tmp_path_factory.mktemp("run"), vllm_environment)) as bench:
        fresh = bench.runner.run(answers(bench.engine))
    with Bench.opened(make_spec(folder, tmp_path_factory.mktemp("run"), vllm_environment)) as bench:
        yield Course(bench, reference, versions, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_after_many_publications_it_answers_as_a_fresh_one(kind: TransportKind, tied: Course, tmp_path: Path) -> None:
    tied.bench.runner.run(tied.run(kind, tied.versions, tmp_path))
    assert tied.bench.runner.run(answers(tied.bench.engine)) == tied.fresh


def test_so_does_one_with_a_head_of_its_own(untied: Course, tmp_path: Path) -> None:
    """One transport after the other: what comes after staging is the same for all."""
    share = PUBLICATIONS // len(KINDS)
    for turn, kind in enumerate(KINDS):
        versions = untied.versions[turn * share : (turn + 1) * share]
        untied.bench.runner.run(untied.run(kind, versions, tmp_path))
    assert untied.bench.runner.run(answers(untied.bench.engine)) == untied.fresh


def test_a_delta_with_a_flipped_byte_is_refused_and_the_next_is_whole(tied: Course, tmp_path: Path) -> None:
    async def run() -> None:
        engine, subject = tied.bench.engine, tied.bench.subject
        config = SyncConfig(transport=TransportKind.DELTA)
        transport = Spoiling(TRANSPORTS[TransportKind.DELTA](tmp_path, config), tmp_path)
        publisher = Publisher([engine], transport, config)
        try:
            served = -1
            for index, weights in enumerate(tied.versions[:4]):
                number, probe = next(NUMBERS), await tied.reference.probe(weights)
                transport.spoils = index == 2
                publishing = publisher.publish(weights, number, 1, InFlightMode.CONTINUE, probe=probe)
                if transport.spoils:
                    with pytest.raises(PayloadError, match=r"damaged|checksum"):
                        await publishing
                else:
                    await publishing
                    served = number
                generated = await subject.run(subject.request(new=4, seed=number))
                assert set(generated.policy_version.tolist()) == {served}
                assert publisher.fenced == {}
        finally:
            await publisher.close()

    tied.bench.runner.run(run())


@final
class Spoiling:
    """Flips a byte of a version before anybody is told where it is."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self.spoils = False

    def hold(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inner.hold(manifest, tensors)

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> WeightSource:
        if self.spoils:
            (path,) = self._folder.rglob(f"{version.name}.delta.bin")
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        return self._inner.offer(version, engines)

    def release(self, version: PolicyVersion) -> None:
        self._inner.release(version)

    def close(self) -> None:
        self._inner.close()


def test_a_broadcast_that_a_dead_member_breaks_is_staged_again_without_it(tied: Course) -> None:
    """Once it dies before it comes, once in the group, and once before it comes to a group that there was."""

    async def run() -> None:
        engine, subject, transport = tied.bench.engine, tied.bench.subject, BroadcastTransport(STALLS_SOON)
        dead = EngineId("dead")
        try:
            for end in (never_comes, leaves_the_group, never_comes):
                manifest = build_manifest(next(NUMBERS), 1, None, tied.versions[-1])
                transport.hold(manifest, tied.versions[-1])
                source = transport.offer(manifest.version, [engine.id, dead])
                staging = asyncio.create_task(engine.stage(manifest, source))
                await asyncio.to_thread(end, source, dead)
                if end is never_comes:
                    with pytest.raises(TransferInterruptedError, match="dead did not come"):
                        await staging
                else:
                    with suppress(TransferInterruptedError):  # it may have got all that it waits for
                        await staging
                generated = await subject.run(subject.request(new=4))
                assert manifest.version.number not in generated.policy_version
                report = await engine.stage(manifest, transport.offer(manifest.version, [engine.id]))
                assert report.moved_bytes >= manifest.size_bytes
                assert (await engine.verify()).digest == manifest.version.digest
                await engine.commit(manifest.version, InFlightMode.CONTINUE)
                transport.release(manifest.version)
        finally:
            transport.close()
        assert await answers(engine) == tied.fresh

    tied.bench.runner.run(run())


def test_a_stage_that_is_called_off_makes_room_for_the_next(tied: Course) -> None:
    async def run() -> None:
        engine, transport = tied.bench.engine, BroadcastTransport(BroadcastConfig())
        manifest = build_manifest(next(NUMBERS), 1, None, tied.versions[-1])
        try:
            transport.hold(manifest, tied.versions[-1])
            source = transport.offer(manifest.version, [engine.id, EngineId("late")])
            staging = asyncio.create_task(engine.stage(manifest, source))
            await asyncio.sleep(0.3)
            staging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await staging
            await engine.rollback()
            await engine.stage(manifest, transport.offer(manifest.version, [engine.id]))
            assert (await engine.verify()).digest == manifest.version.digest
            await engine.commit(manifest.version, InFlightMode.CONTINUE)
        finally:
            transport.close()
        assert await answers(engine) == tied.fresh

    tied.bench.runner.run(run())


def never_comes(source: BroadcastSource, member: EngineId) -> None:
    """Dead before the transfer."""


def leaves_the_group(source: BroadcastSource, member: EngineId) -> None:
    """Dead once the group is formed."""
    visit = visit_store(source.host, source.port)
    transfer, rank = PrefixStore(source.transfer, visit.store), source.ranks[member]
    say_present(transfer, rank, Present(group=None, device="cpu"))
    verdict = await_verdict(transfer, source.stall_s, threading.Event())
    assert verdict is not None
    assert verdict.group is not None
    size = len(source.ranks) + 1
    form_gloo(verdict.group, visit.store, rank, size, visit.address, source.stall_s).close()


def test_what_is_written_from_outside_is_refused(tied: Course) -> None:
    async def run() -> None:
        manifest = build_manifest(next(NUMBERS), 1, None, tied.versions[0])
        source = PeerSource(fabric="nixl", engines=(tied.bench.engine.id,), ranks=(), timeout_s=1.0)
        with pytest.raises(EngineRefusedError, match="broadcast"):
            await tied.bench.engine.stage(manifest, source)

    tied.bench.runner.run(run())


def test_a_head_that_keeps_the_old_weights_is_fenced(fresh_tied: Fresh, tmp_path: Path) -> None:
    """What vLLM itself does to a tied head. Then its supervisor is killed, and all of it ends."""
    bench, engine = fresh_tied.bench, fresh_tied.bench.engine

    async def run() -> None:
        reference = Reference(bench.folder)
        weights = bench.shelf.weights(77)
        publisher = make_publisher([engine], TransportKind.SHARED, tmp_path)
        with suppress(DeliveryError):
            await publisher.publish(weights, 0, 1, InFlightMode.CONTINUE, probe=await reference.probe(weights))
        await publisher.close()
        assert publisher.serving == ()
        assert "behavioural probe failed at v0@1" in publisher.fenced[engine.id]
        requests = [bench.subject.request(new=150, seed=seed) for seed in range(8)]  # one may be over before it dies
        running = [await bench.subject.begin(request) for request in requests]
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        ended = await asyncio.gather(*(each.finish() for each in running), return_exceptions=True)
        dead = [error for error in ended if isinstance(error, BaseException)]
        assert dead
        assert all(isinstance(error, EngineDeadError) and "last lines" in str(error) for error in dead)
        with pytest.raises(EngineDeadError):
            await engine.health()
        async with asyncio.timeout(20):
            while processes_of(bench.folder):
                await asyncio.sleep(0.1)

    bench.runner.run(run())


def processes_of(folder: Path) -> list[int]:
    """Processes that serve this model, or were started by one that does."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"FATHOM_VLLM_FAULTS=stale_head,{folder.name}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
