"""delta: engines read what changed, and are whole or refuse; a version that failed is followed by an anchor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chains import blank, first, holds, versions

from fathom.config.families import TransportKind
from fathom.config.sync import ChainConfig, SyncConfig
from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.chain.media.faulty import FaultyMedium, MediumFault
from fathom.sync.chain.media.local import LocalMedium
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publication import Publication
from fathom.sync.publisher import Publisher
from fathom.sync.transports.delta import DeltaTransport

TENSORS = versions(9)
SYNC = SyncConfig(transport=TransportKind.DELTA, timeout_s=20)


class World:
    """A publisher over delta, with receivers; a context, so that its transport is closed."""

    def __init__(self, folder: Path, *, engines: int = 1, live: bool = False, config: ChainConfig | None = None):
        self.folder = folder
        self.receivers = [
            MemoryReceiver(
                EngineId(f"engine-{number}"),
                blank(first()),
                receives_into=ReceivesInto.LIVE if live else ReceivesInto.STAGING,
            )
            for number in range(engines)
        ]
        transport = DeltaTransport.open(folder, config or ChainConfig(anchor_every=3))
        self.publisher = Publisher(self.receivers, transport, SYNC)

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_) -> None:
        await self.publisher.close()

    async def publish(self, number: int) -> Publication:
        return await self.publisher.publish(TENSORS[number], number, 1, InFlightMode.CONTINUE)

    def serves(self, number: int) -> bool:
        manifest = build_manifest(number, 1, None, TENSORS[number])
        return all(
            receiver.version == manifest.version and holds(dict(receiver.weights), manifest)
            for receiver in self.receivers
        )


def test_after_the_first_version_only_what_changed_moves(tmp_path):
    async def scenario():
        async with World(tmp_path, engines=2) as world:
            moved = [(await world.publish(number)).moved_bytes for number in range(9)]
            assert world.serves(8)
        on_disk = [path.stat().st_size for path in sorted((tmp_path / "chain").glob("*/v1@1.delta.*"))]
        assert moved[1] == 2 * sum(on_disk), "what is reported is what was read: data and link, by both engines"
        assert all(each < 0.6 * moved[0] for each in moved[1:]), "an anchor that is due is nothing to engines"

    asyncio.run(scenario())


def test_an_engine_that_receives_over_what_serves_starts_from_an_anchor(tmp_path):
    async def scenario():
        async with World(tmp_path, live=True) as world:
            for number in range(5):
                await world.publish(number)
                assert world.serves(number)

    asyncio.run(scenario())


def test_an_engine_that_joins_late_is_loaded_from_an_anchor_and_what_follows(tmp_path):
    async def scenario():
        async with World(tmp_path) as world:
            for number in range(6):
                await world.publish(number)
            late = MemoryReceiver(EngineId("late"), blank(first()))
            await world.publisher.restore(late)
            world.receivers.append(late)
            assert world.serves(5)
            await world.publish(6)
            assert world.serves(6)

    asyncio.run(scenario())


def test_a_damaged_version_is_refused_the_parent_serves_and_the_next_one_is_an_anchor(tmp_path):
    async def scenario():
        async with World(tmp_path, engines=2, config=ChainConfig(anchor_every=100)) as world:
            for number in range(3):
                await world.publish(number)
            world.receivers[0].stage = damaging(tmp_path / "chain/data/v3@1.delta.bin", world.receivers[0].stage)
            with pytest.raises(PayloadError, match=r"v3@1 is cancelled.*tensor '\w+'.*data/v3@1.delta.bin"):
                await world.publish(3)
            assert world.serves(2)
            await world.publish(4)
            assert world.serves(4)
            assert ChainReader(Store.open(tmp_path / "chain")).find(4).parent is None
            await world.publish(5)
            assert ChainReader(Store.open(tmp_path / "chain")).find(5).parent is not None

    asyncio.run(scenario())


def damaging(path: Path, stage):
    """Flips a byte before the version is read; the other engine reads after it."""

    async def damage_and_stage(manifest, source):
        if path.exists():
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return await stage(manifest, source)

    return damage_and_stage


def test_a_version_that_failed_can_be_published_again(tmp_path):
    async def scenario():
        async with World(tmp_path) as world:
            await world.publish(0)
            world.publisher.fence(EngineId("engine-0"), "for a test")
            with pytest.raises(DeliveryError):
                await world.publish(1)
            await world.publisher.restore(world.receivers[0])
            assert world.serves(0)
            await world.publish(1)
            assert world.serves(1)

    asyncio.run(scenario())


def test_a_full_store_cancels_the_publication_and_the_next_one_is_whole(tmp_path):
    async def scenario():
        medium = FaultyMedium(LocalMedium(tmp_path), {moment: MediumFault.RAISE for moment in (5, 6, 7, 8)})
        transport = DeltaTransport(ChainWriter(Store(medium), ChainConfig()))
        receiver = MemoryReceiver(EngineId("a"), blank(first()))
        publisher = Publisher([receiver], transport, SYNC)
        failed = 0
        for number in range(5):
            try:
                await publisher.publish(TENSORS[number], number, 1, InFlightMode.CONTINUE)
            except DeliveryError as error:
                failed += "cannot write" in str(error)
        assert failed > 0
        assert receiver.version is not None
        assert receiver.version.number == 4
        assert holds(dict(receiver.weights), build_manifest(4, 1, None, TENSORS[4]))
        await publisher.close()

    asyncio.run(scenario())


def test_troubles_of_what_nobody_waits_for_are_told_and_it_is_tried_again(tmp_path):
    troubles: list[Exception] = []
    medium = FaultyMedium(LocalMedium(tmp_path), {7: MediumFault.RAISE})
    transport = DeltaTransport(ChainWriter(Store(medium), ChainConfig(anchor_every=1)), troubles.append)
    manifests = [build_manifest(number, 1, None, tensors) for number, tensors in enumerate(TENSORS[:3])]
    for manifest, tensors in zip(manifests, TENSORS, strict=False):
        transport.hold(manifest, tensors)
        transport.offer(manifest.version, [])
    transport.close()
    assert len(troubles) == 1
    assert "cannot write data/v1@1.anchor.bin" in str(troubles[0])
    kinds = {(link.version.number, link.parent is None) for link in ChainReader(Store.open(tmp_path)).links()}
    assert kinds == {(0, True), (1, False), (2, False), (2, True)}


def test_what_is_not_held_is_not_offered_and_what_was_published_stays(tmp_path):
    transport = DeltaTransport.open(tmp_path, ChainConfig())
    manifest = build_manifest(0, 1, None, TENSORS[0])
    with pytest.raises(DeliveryError, match="v0@1 is not held"):
        transport.offer(manifest.version, [])
    transport.hold(manifest, TENSORS[0])
    transport.close()
    transport.close()
    into = blank(first())
    ChainReader(Store.of_run(tmp_path, None)).materialise(manifest.version, into, None)
    assert holds(into, manifest)
