"""Peer to peer between ranks that hold slices: each rank gets its share, and one publisher sees one engine."""

import asyncio
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import ENGINE, OTHER, blank, landing, model, never, sending, whole

from fathom.config.families import TransportKind
from fathom.config.sync import SyncConfig
from fathom.core.errors import DeliveryError, EngineError, EngineRefusedError, PayloadError
from fathom.core.manifest import DiskSource
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, digest
from fathom.sync.publisher import Publisher
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.fabrics.memory_fabric import FabricFaults
from fathom.sync.transports.p2p.layouts import parallel
from fathom.sync.transports.p2p.sharded_receiver import ShardedReceiver

SHAPES = {name: tuple(tensor.shape) for name, tensor in model().items()}
TENSOR = parallel(SHAPES, 2, {"embed": 0, "q": 0, "o": 1})
"""Tensor-parallel in both dimensions; the rest everywhere."""
EXPERT = parallel(SHAPES, 2, {"embed": 1, "experts": 0}, {"expert.0": frozenset({0}), "expert.1": frozenset({1})})
"""A stacked expert tensor cut in its first dimension, and experts that one rank holds."""
FSDP = parallel(SHAPES, 3, {name: 0 for name, shape in SHAPES.items() if shape})
"""Every tensor cut in its first dimension."""
LAYOUTS = {"whole": (None,), "replicas": (None, None), "tensor": TENSOR, "expert": EXPERT, "fsdp": FSDP}


def expected_bytes(layout) -> list[int]:
    """By rank, bytes of its slices."""
    return [sum(box.elements * model()[name].element_size() for name, box in rank.items()) for rank in layout]


def assert_holds(receiver: ShardedReceiver, layout, tensors) -> None:
    for slices, boxes in zip(receiver.weights, layout, strict=True):
        assert slices.keys() == boxes.keys()
        for name, each in slices.items():
            assert torch.equal(each.tensor, tensors[name][boxes[name].slices])


@pytest.mark.parametrize("sources", LAYOUTS)
@pytest.mark.parametrize("ranks", ["tensor", "expert", "fsdp"])
def test_each_rank_receives_its_slices_and_nothing_else(sources, ranks):
    async def scenario(side):
        layout = LAYOUTS[ranks]
        receiver = ShardedReceiver(ENGINE, model(), layout)
        publisher = Publisher([receiver], side.transport, SyncConfig(transport=TransportKind.P2P, timeout_s=20))
        for number in range(3):
            report = await publisher.publish(model(number), number, 1, InFlightMode.CONTINUE)
            assert list(receiver.rank_bytes) == expected_bytes(layout)
            assert report.moved_bytes == sum(expected_bytes(layout))
            assert_holds(receiver, layout, model(number))
        await publisher.close()
        receiver.close()

    with sending(LAYOUTS[sources]) as side:
        asyncio.run(scenario(side))


@pytest.mark.parametrize("sources", LAYOUTS)
def test_an_engine_of_one_rank_receives_whole_tensors_from_any_layout(sources):
    manifest = build_manifest(0, 1, None, model())
    with sending(LAYOUTS[sources]) as side, landing() as (rank, _):
        into = blank()
        assert rank.receive(side.send(manifest, model()), manifest, whole(into), never) == manifest.size_bytes
        assert digest(into) == manifest.version.digest


def test_ranks_share_what_every_source_holds_as_it_is_planned():
    """`algorithms.md` G.2: four sources, two engines of three ranks."""
    layout = parallel(SHAPES, 3, {"embed": 0, "q": 1})
    with sending([None] * 4) as side:
        manifest = build_manifest(0, 1, None, model())
        source = side.send(manifest, model(), ENGINE, OTHER)
        for name in (ENGINE, OTHER):
            receiver = ShardedReceiver(name, model(), layout)
            asyncio.run(receiver.stage(manifest, source))
            receiver.close()
        sizes = expected_bytes(layout)
        written = [fabric.written_bytes for fabric in side.fabrics]
        assert written == [sizes[0], 2 * sizes[1], 2 * sizes[2], sizes[0]]


def test_a_rank_that_failed_is_named_and_the_whole_engine_is_fenced():
    async def scenario(side):
        receiver = ShardedReceiver(ENGINE, model(), TENSOR)
        publisher = Publisher([receiver], side.transport, SyncConfig(transport=TransportKind.P2P, timeout_s=20))
        await publisher.publish(model(0), 0, 1, InFlightMode.CONTINUE)
        side.fabrics[1].faults = FabricFaults(fail_at=side.fabrics[1].writes + 1, partial_bytes=1)
        with pytest.raises(DeliveryError, match=r"rank \d did not receive tensor '[\w.]+' whole: source rank 1"):
            await publisher.publish(model(1), 1, 1, InFlightMode.CONTINUE)
        assert_holds(receiver, TENSOR, model(0))
        await publisher.restore(receiver)
        assert_holds(receiver, TENSOR, model(0))
        await publisher.close()
        receiver.close()

    with sending((None, None)) as side:
        asyncio.run(scenario(side))


def staged(receiver: ShardedReceiver, side, number: int = 0):
    manifest = build_manifest(number, 1, None, model(number))
    asyncio.run(receiver.stage(manifest, side.send(manifest, model(number))))
    return manifest


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["embed", "q", "o", "experts", "scale", "mask"])
def test_a_flipped_byte_in_any_ranks_memory_is_seen_by_name(name, rank):
    with sending() as side:
        receiver = ShardedReceiver(ENGINE, model(), TENSOR, ReceivesInto.LIVE)
        manifest = staged(receiver, side)
        assert asyncio.run(receiver.verify()).digest == manifest.version.digest
        bytes_ = receiver.weights[rank][name].tensor.view(-1).view(torch.uint8)
        bytes_[-1] ^= 1
        report = asyncio.run(receiver.verify())
        assert report.wrong == (name,)
        assert report.digest != manifest.version.digest
        receiver.close()


def test_a_layout_must_hold_every_part():
    with pytest.raises(ValueError, match=r"no rank of a holds \(\(5, 10\), \(0, 6\)\) of 'embed'"):
        ShardedReceiver(ENGINE, model(), [TENSOR[0]])


def test_sources_must_hold_every_part():
    with sending([FSDP[0], FSDP[1]]) as side:
        receiver = ShardedReceiver(ENGINE, model(), TENSOR)
        with pytest.raises(PayloadError, match=r"no source holds .* of tensor 'expert.0'"):
            staged(receiver, side)
        receiver.close()


def test_other_sources_and_other_models_are_refused_by_name():
    receiver = ShardedReceiver(ENGINE, model(), TENSOR)
    manifest = build_manifest(0, 1, None, model())
    with pytest.raises(EngineRefusedError, match=r"sync.transport = 'p2p'"):
        asyncio.run(receiver.stage(manifest, DiskSource(path="x")))
    with sending() as side:
        transposed = model() | {"q": torch.zeros(6, 8)}
        other = build_manifest(0, 1, None, transposed)
        with pytest.raises(PayloadError, match="'q'"):
            asyncio.run(receiver.stage(other, side.send(other, transposed)))
    with pytest.raises(EngineError, match="nothing is staged"):
        asyncio.run(receiver.verify())
    receiver.close()


@st.composite
def layouts(draw, ranks: int):
    dims = {
        name: draw(st.integers(0, len(shape) - 1)) for name, shape in SHAPES.items() if shape and draw(st.booleans())
    }
    some = st.frozensets(st.integers(0, ranks - 1), min_size=1)
    owners = {name: draw(some) for name in SHAPES if name not in dims and draw(st.booleans())}
    return parallel(SHAPES, ranks, dims, owners)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), live=st.booleans())
def test_whatever_the_layouts_and_wherever_it_breaks_no_wrong_weight_serves(data, live):
    sources = data.draw(layouts(data.draw(st.integers(1, 3))))
    ranks = data.draw(layouts(data.draw(st.integers(1, 3))))
    faults = st.builds(
        FabricFaults,
        fail_at=st.none() | st.integers(0, 40),
        partial_bytes=st.integers(0, 9),
        lose_at=st.none() | st.integers(0, 40),
    )

    async def scenario(side):
        receiver = ShardedReceiver(ENGINE, model(), ranks, ReceivesInto.LIVE if live else ReceivesInto.STAGING)
        publisher = Publisher([receiver], side.transport, SyncConfig(transport=TransportKind.P2P, timeout_s=20))
        for fabric in side.fabrics:
            fabric.faults = data.draw(faults)
        for number in range(4):
            with suppress(DeliveryError, PayloadError):
                await publisher.publish(model(number), number, 1, InFlightMode.CONTINUE)
            if not publisher.serving and publisher.delivered is not None:
                try:
                    await publisher.restore(receiver)
                except EngineError:
                    assert not publisher.serving
            if publisher.serving:
                assert receiver.version == publisher.delivered
                assert_holds(receiver, ranks, model(publisher.delivered.number))
        await publisher.close()
        receiver.close()

    with sending(sources) as side:
        asyncio.run(scenario(side))


def test_boxes_of_sources_travel_with_the_offer():
    with sending(EXPERT) as side:
        manifest = build_manifest(0, 1, None, model())
        offered = side.send(manifest, model())
    assert [{shard.name: Box(shard.bounds) for shard in rank.shards} for rank in offered.ranks] == list(EXPERT)
