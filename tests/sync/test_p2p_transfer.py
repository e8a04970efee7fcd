"""Peer to peer, one rank on each side: to the bit, registered once, and a failure is this engine's alone, by name."""

import asyncio
import socket
import threading
import time
from contextlib import suppress

import msgspec
import pytest
import torch
from peers import ENGINE, OTHER, blank, landing, model, never, sending, whole
from pydantic import ValidationError

from fathom.config.families import FabricKind, TransportKind
from fathom.config.sync import PeerConfig, SyncConfig
from fathom.core.errors import ConfigError, DeliveryError, EngineError, PayloadError
from fathom.core.manifest import PeerRank, PeerSource, SharedMemorySource
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, digest
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.shards import Box
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.p2p.fabrics.memory_fabric import FabricFaults
from fathom.sync.transports.p2p.held import Slice
from fathom.sync.transports.p2p.landing import Landing
from fathom.sync.transports.p2p.line import Line, LineError
from fathom.sync.transports.p2p.messages import Answer, Ask, Failed, Hello
from fathom.sync.transports.p2p.peer_transport import PeerTransport

WRITES = len([tensor for tensor in model().values() if tensor.numel()])


def version(number: int = 0):
    tensors = model(number)
    return build_manifest(number, 1, None, tensors), tensors


def test_versions_arrive_and_memory_is_registered_once():
    sets = [blank(), blank()]
    with sending() as side, landing() as (rank, opened):
        before = None
        for number in range(6):
            manifest, tensors = version(number)
            source = side.send(manifest, tensors)
            into = sets[number % 2]
            assert rank.receive(source, manifest, whole(into), never) == manifest.size_bytes
            assert digest(into) == manifest.version.digest
            if before is not None:
                side.transport.release(before)
            before = manifest.version
            registered = opened[0].registered
            assert len(registered) == WRITES * min(number + 1, 2)
            assert len(side.fabrics[0].registered) == min(number + 1, 2), "two buffers, used in turn"
            assert len(side.fabrics[0].met) == 1
        assert len(opened) == 1
        assert side.fabrics[0].written_bytes == 6 * manifest.size_bytes


def test_tensors_that_are_a_new_set_replace_the_oldest_of_three():
    with sending() as side, landing() as (rank, opened):
        source, (manifest, _) = side.send(*version()), version()
        for _ in range(5):
            rank.receive(source, manifest, whole(blank()), never)
        assert len(opened[0].registered) == 3 * WRITES


def test_what_the_trainer_changes_after_hold_does_not_travel():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, _):
        source = side.send(manifest, tensors)
        tensors["q"].zero_()
        into = blank()
        rank.receive(source, manifest, whole(into), never)
        assert digest(into) == manifest.version.digest


@pytest.mark.parametrize("partial_bytes", [0, 5])
@pytest.mark.parametrize("fail_at", range(WRITES))
def test_a_failed_or_partial_write_names_rank_and_tensor_and_the_next_stage_is_whole(fail_at, partial_bytes):
    manifest, tensors = version()
    failing = sorted(name for name, tensor in tensors.items() if tensor.numel())[fail_at]
    faults = FabricFaults(fail_at=fail_at, partial_bytes=partial_bytes)
    with sending(faults=faults) as side, landing() as (rank, opened):
        source, into = side.send(manifest, tensors), blank()
        with pytest.raises(EngineError, match=rf"rank 0 did not receive tensor '{failing}' whole: source rank 0 \("):
            rank.receive(source, manifest, whole(into), never)
        rank.receive(source, manifest, whole(into), never)
        assert digest(into) == manifest.version.digest
        assert not opened[0].registered, "what failed is set up anew"
        assert len(opened) == 2


def test_a_failure_of_one_engine_is_not_that_of_another():
    manifest, tensors = version()
    with sending(faults=FabricFaults(fail_at=3)) as side, landing() as (one, _), landing(OTHER) as (other, _):
        source, into = side.send(manifest, tensors, ENGINE, OTHER), blank()
        with pytest.raises(EngineError, match="engine a"):
            one.receive(source, manifest, whole(blank()), never)
        other.receive(source, manifest, whole(into), never)
        assert digest(into) == manifest.version.digest


def test_a_write_that_takes_too_long_names_the_tensor():
    manifest, tensors = version()
    slow = sending(timeout_s=0.2, faults=FabricFaults(slow_s=0.15))
    named = pytest.raises(EngineError, match=r"tensor '[\w.]+' whole: .*took more than 0.2 s")
    with slow as side, landing() as (rank, _), named:
        rank.receive(side.send(manifest, tensors), manifest, whole(blank()), never)


def test_a_source_that_is_silent_is_given_up_and_named():
    manifest, tensors = version()
    with sending(faults=FabricFaults(slow_s=60)) as side, landing() as (rank, _):
        source = msgspec.structs.replace(side.send(manifest, tensors), timeout_s=0.2)
        with pytest.raises(EngineError, match=r"source rank 0 .*: not everything was written within 0.2 s"):
            rank.receive(source, manifest, whole(blank()), never)


def test_once_given_up_nothing_writes_any_more():
    manifest, tensors = version()
    into, gone = blank(), threading.Event()
    with sending(faults=FabricFaults(slow_s=0.05)) as side, landing() as (rank, opened):
        source = side.send(manifest, tensors)
        receiving = threading.Thread(target=rank.receive, args=(source, manifest, whole(into), gone.is_set))
        receiving.start()
        while not side.fabrics[0].written_bytes:
            time.sleep(0.001)
        gone.set()
        receiving.join(10)
        assert not receiving.is_alive()
        assert not opened[0].registered
        before = digest(into)
        side.fabrics[0].faults = FabricFaults()
        time.sleep(0.1)
        assert digest(into) == before != manifest.version.digest


@pytest.mark.parametrize("how", ["offer", "release", "close"])
def test_writes_of_an_earlier_offer_have_ended_when_the_source_goes_on(how):
    manifest, tensors = version()
    with sending(faults=FabricFaults(slow_s=0.05)) as side, landing() as (rank, _):
        source, into, failures = side.send(manifest, tensors), blank(), []

        def receive():
            try:
                rank.receive(source, manifest, whole(into), never)
            except EngineError as error:
                failures.append(str(error))

        receiving = threading.Thread(target=receive)
        receiving.start()
        while not side.fabrics[0].written_bytes:
            time.sleep(0.001)
        if how == "offer":
            side.transport.offer(manifest.version, [ENGINE])
        elif how == "release":
            side.transport.release(manifest.version)
        else:
            side.transport.close()
        written = side.fabrics[0].written_bytes
        receiving.join(10)
        assert side.fabrics[0].written_bytes == written < manifest.size_bytes
        assert "source rank 0" in failures[0]


def test_an_engine_that_never_asks_does_not_hold_up_the_next_offer():
    manifest, tensors = version()
    with sending(timeout_s=1e4) as side, landing() as (rank, _):
        old = side.send(manifest, tensors).ranks[0]
        silent = Line.connect(old.host, old.port, 5)
        silent.send(Hello(old.token), 5)
        time.sleep(0.05)
        source, into = side.transport.offer(manifest.version, [ENGINE]), blank()
        rank.receive(source, manifest, whole(into), never)
        silent.send(Ask(engine=ENGINE, rank=0, version=manifest.version, fabric=b"", places=()), 5)
        assert "offer is over" in silent.receive(Answer, 1 << 10, 5).reason
        silent.close()


def test_a_source_that_has_ended_is_named():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, _):
        source = side.send(manifest, tensors)
        side.transport.close()
        with pytest.raises(
            EngineError, match=r"engine a: rank 0: source rank 0 \(127.0.0.1 port \d+\) cannot be reached"
        ):
            rank.receive(source, manifest, whole(blank()), never)


def test_memory_is_never_used_again_when_a_source_does_not_say_that_it_stopped():
    manifest, _ = version()
    rank = Landing(ENGINE, stop_s=0.05)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = PeerRank(host="127.0.0.1", port=hung.getsockname()[1], token="", shards=None)
        source = PeerSource(fabric=FabricKind.MEMORY, engines=(ENGINE,), ranks=(address,), timeout_s=0.05)
        with pytest.raises(EngineError, match="not everything was written"):
            rank.receive(source, manifest, whole(blank()), never)
        with pytest.raises(EngineError, match="replace the engine"):
            rank.receive(source, manifest, whole(blank()), never)


def test_a_restarted_engine_is_met_anew_and_one_that_is_not_offered_to_is_forgotten():
    manifest, tensors = version()
    with sending() as side:
        for _ in range(3):
            source, into = side.send(manifest, tensors, ENGINE, OTHER), blank()
            with landing() as (rank, _):
                rank.receive(source, manifest, whole(into), never)
            assert digest(into) == manifest.version.digest
            assert len(side.fabrics[0].met) == 1
            side.transport.release(manifest.version)
        side.send(manifest, tensors, OTHER)
        assert not side.fabrics[0].met


def test_only_the_engines_of_the_offer_are_served_and_only_with_its_token():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, _), landing(OTHER) as (stranger, _):
        old = side.send(manifest, tensors)
        with pytest.raises(EngineError, match=r"engine b: .* is not offered to it"):
            stranger.receive(old, manifest, whole(blank()), never)
        forged = msgspec.structs.replace(old, engines=(ENGINE, OTHER))
        with pytest.raises(EngineError, match="not offered to b"):
            stranger.receive(forged, manifest, whole(blank()), never)
        new = side.transport.offer(manifest.version, [ENGINE])
        assert new.ranks[0].token != old.ranks[0].token
        into = blank()
        with pytest.raises(EngineError, match="offer is over, or the token is wrong"):
            rank.receive(old, manifest, whole(into), never)
        assert digest(into) == digest(blank())
        rank.receive(new, manifest, whole(into), never)


def test_another_version_than_the_one_offered_is_not_sent():
    manifest, tensors = version()
    other, _ = version(1)
    with sending() as side, landing() as (rank, _):
        source, into = side.send(manifest, tensors), blank()
        with pytest.raises(EngineError, match=r"v1@1 is not offered"):
            rank.receive(source, other, whole(into), never)
        assert digest(into) == digest(blank())


def test_a_version_must_be_held_to_be_offered():
    manifest, tensors = version()
    with sending() as side:
        with pytest.raises(DeliveryError, match="not held"):
            side.transport.offer(manifest.version, [ENGINE])
        side.send(manifest, tensors)
        side.transport.release(manifest.version)
        with pytest.raises(DeliveryError, match="not held"):
            side.transport.offer(manifest.version, [ENGINE])


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ({"more": Slice(box=Box(((0, 2),)), tensor=torch.zeros(2))}, "'more' is held, but not in the manifest"),
        ({"q": Slice(box=Box(((0, 4), (0, 6))), tensor=torch.zeros(3, 6))}, "'q'"),
        ({"q": Slice(box=Box(((0, 3), (0, 6))), tensor=torch.zeros(3, 6).half())}, "'q'.*F32"),
    ],
)
def test_what_is_held_must_be_as_it_says(held, named):
    manifest, _ = version()
    with sending() as side, pytest.raises(PayloadError, match=named):
        side.senders[0].hold(manifest, held)


def test_asking_for_what_is_not_held_is_a_fault_of_the_version():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, _):
        side.senders[0].hold(manifest, whole({name: tensors[name] for name in tensors if name != "q"}))
        source = side.transport.offer(manifest.version, [ENGINE])  # says that everything is held
        with pytest.raises(PayloadError, match=r"tensor 'q' is not held here"):
            rank.receive(source, manifest, whole(blank()), never)


def test_strangers_at_the_control_socket_learn_nothing_and_hold_up_nobody():
    manifest, tensors = version()
    with sending() as side, landing() as (rank, _):
        source, into = side.send(manifest, tensors), blank()
        address = (source.ranks[0].host, source.ranks[0].port)
        silent = socket.create_connection(address)
        huge = socket.create_connection(address)
        huge.sendall(b"\xff\xff\xff\xff" + b"x" * 2000)
        garbage = socket.create_connection(address)
        garbage.sendall(b"\0\0\0\4GET ")
        guess = Line.connect(*address, 5)
        guess.send(Hello("guess"), 5)
        answer = guess.receive(Answer, 1 << 10, 5)
        assert isinstance(answer, Failed)
        for stranger in (huge, garbage):
            stranger.settimeout(5)
            with stranger, suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        rank.receive(source, manifest, whole(into), never)
        assert digest(into) == manifest.version.digest
        silent.close()
        guess.close()


def test_messages_have_deadlines_and_limits():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line.connect("127.0.0.1", server.getsockname()[1], 5)
        other = Line(server.accept()[0])
    ours.close()
    theirs.close()
    with pytest.raises(LineError, match=r"silent for 0.02 s"):
        line.receive(Hello, 100, 0.02)
    other.send(Hello("x" * 200), 5)
    with pytest.raises(LineError, match="100 are the most"):
        line.receive(Hello, 100, 5)
    assert not other.left
    line.finish()
    time.sleep(0.01)
    assert other.left
    line.close()
    other.close()


def test_an_inbox_reads_it_like_any_other_source():
    manifest, tensors = version()
    into = blank()
    inbox = Inbox(ENGINE)
    with sending() as side:
        source = side.send(manifest, tensors)
        assert asyncio.run(inbox.receive(manifest, source, into, None)) == manifest.size_bytes
        assert digest(into) == manifest.version.digest
        with pytest.raises(PayloadError):
            asyncio.run(inbox.receive(manifest, SharedMemorySource(path="/gone"), into, None))
        inbox.close()


def fleet(side, **kinds: ReceivesInto):
    engines = [MemoryReceiver(name, model(), receives_into=kind) for name, kind in kinds.items()]
    return engines, Publisher(engines, side.transport, SyncConfig(transport=TransportKind.P2P, timeout_s=20.0))


def test_a_fleet_is_served_and_an_engine_whose_transfer_failed_is_fenced_and_restored():
    async def scenario(side):
        engines, publisher = fleet(side, a=ReceivesInto.STAGING, b=ReceivesInto.STAGING, c=ReceivesInto.LIVE)
        for number in range(3):
            report = await publisher.publish(model(number), number, 1, InFlightMode.CONTINUE)
            assert report.moved_bytes == 3 * report.size_bytes
        side.fabrics[0].faults = FabricFaults(fail_at=3 * 3 * WRITES + 4)
        report = await publisher.publish(model(3), 3, 1, InFlightMode.CONTINUE)
        ((fenced, reason),) = report.fenced.items()
        assert "source rank 0" in reason
        assert "tensor '" in reason
        assert len(report.committed) == 2
        broken = next(engine for engine in engines if engine.id == fenced)
        await publisher.restore(broken)
        assert set(publisher.serving) == {"a", "b", "c"}
        assert {digest(engine.weights) for engine in engines} == {report.version.digest}
        await publisher.close()
        for engine in engines:
            engine.close()

    with sending() as side:
        asyncio.run(scenario(side))


def test_a_half_written_live_engine_is_fenced_and_comes_back_with_the_parent():
    async def scenario(side):
        (live,), publisher = fleet(side, live=ReceivesInto.LIVE)
        first = await publisher.publish(model(0), 0, 1, InFlightMode.CONTINUE)
        side.fabrics[0].faults = FabricFaults(fail_at=WRITES + 5, partial_bytes=1)
        with pytest.raises(DeliveryError, match=r"live: .*source rank 0"):
            await publisher.publish(model(1), 1, 1, InFlightMode.CONTINUE)
        assert publisher.serving == ()
        assert live.version is None
        halves = (digest(model(0)), digest(model(1)))
        assert digest(live.weights) not in halves, "it was written over, but not whole"
        await publisher.restore(live)
        assert digest(live.weights) == first.version.digest == live.version.digest
        await publisher.close()
        live.close()

    with sending() as side:
        asyncio.run(scenario(side))


def test_a_write_that_was_lost_is_seen_by_the_digest_and_cancels_nothing_else():
    async def scenario(side):
        engines, publisher = fleet(side, a=ReceivesInto.STAGING, b=ReceivesInto.STAGING)
        await publisher.publish(model(0), 0, 1, InFlightMode.CONTINUE)
        side.fabrics[0].faults = FabricFaults(lose_at=2 * WRITES)
        report = await publisher.publish(model(1), 1, 1, InFlightMode.CONTINUE)
        (reason,) = report.fenced.values()
        assert "wrong tensors: [" in reason
        await publisher.close()
        for engine in engines:
            engine.close()

    with sending() as side:
        asyncio.run(scenario(side))


def test_options_that_would_be_ignored_or_cannot_work_are_refused():
    with pytest.raises(ValidationError, match=r"sync.p2p changes nothing with sync.transport = 'disk'"):
        SyncConfig(transport=TransportKind.DISK, p2p=PeerConfig())
    with pytest.raises(ValidationError, match="name one of its addresses"):
        PeerConfig(host="0.0.0.0")
    assert PeerConfig().fabric is FabricKind.NIXL


def test_an_address_that_is_not_ours_names_the_options():
    with pytest.raises(ConfigError, match=r"sync.p2p.host"), sending() as side:
        type(side.senders[0])(side.fabrics[0], "192.0.2.1", 0, 1.0)


def test_when_one_of_several_sources_cannot_listen_none_does():
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    config = PeerConfig(fabric=FabricKind.MEMORY, port=port)
    with pytest.raises(ConfigError, match=rf"sync.p2p.port = {port}"):
        PeerTransport.open(config, 5.0, (None, None))
    PeerTransport.open(config, 5.0).close()
