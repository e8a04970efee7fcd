"""The protocol: each engine ends with the old or the new version, whole, or is fenced."""

import asyncio

import pytest
import torch

from fathom.config.sync import SyncConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import digest
from fathom.sync.faults.faulty_receiver import FaultyReceiver, Wrong
from fathom.sync.faults.scripted_clock import run_scripted
from fathom.sync.faults.scripted_faults import Fault, FaultKind, ScriptedFaults
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.transports.shared import SharedTransport

STAGING = ReceivesInto.STAGING
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
PLACES = [f"{phase}.{when}" for phase in ("stage", "verify", "commit") for when in ("before", "after")]


def weights(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(3, 4, generator=generator).bfloat16() for name in ("embed", "q", "k")}


class Prefixed:
    """The places of one engine in a script for all."""

    def __init__(self, script, prefix) -> None:
        self._script, self._prefix = script, prefix

    async def reach(self, place) -> None:
        await self._script.reach(self._prefix + place)


def receiver(name, receives_into=STAGING, faults=None) -> FaultyReceiver:
    places = Prefixed(faults or ScriptedFaults(), f"{name}/")
    return FaultyReceiver(MemoryReceiver(EngineId(name), weights(0), places, receives_into))


class Fleet:
    """Three engines, a publisher and its transport."""

    def __init__(self, folder, *faults: Fault, min_engines: int = 1, live=()):
        self.faults = ScriptedFaults(*faults)
        self.engines = {
            name: receiver(name, ReceivesInto.LIVE if name in live else STAGING, self.faults) for name in (A, B, C)
        }
        self.transport = SharedTransport(folder, memory_folder=folder)
        self.publisher = Publisher(
            list(self.engines.values()),
            self.transport,
            SyncConfig(min_engines=min_engines),
            self.faults,
        )

    async def publish(self, number: int, incarnation: int = 1):
        return await self.publisher.publish(weights(number), number, incarnation, InFlightMode.CONTINUE)

    def holds(self, engine: EngineId, number: int | None) -> bool:
        receiver = self.engines[engine].inner
        if number is None:
            return receiver.version is None
        return (
            receiver.version is not None
            and receiver.version.number == number
            and digest(receiver.weights) == receiver.version.digest == digest(weights(number))
        )


@pytest.fixture
def fleet(tmp_path):
    opened = []

    def open_fleet(*faults, **options):
        opened.append(Fleet(tmp_path, *faults, **options))
        return opened[-1]

    yield open_fleet
    for each in opened:
        each.transport.close()


def test_a_version_reaches_every_engine_and_the_report_says_so(fleet):
    fleet = fleet()

    async def scenario():
        assert fleet.publisher.serving == ()
        first, second = await fleet.publish(0), await fleet.publish(1)
        assert first.parent is None
        assert second.parent == first.version
        assert second.version.digest == digest(weights(1))
        assert second.committed == fleet.publisher.serving == (A, B, C)
        assert second.fenced == {}
        assert second.size_bytes == 3 * 12 * 2
        assert min(second.write_s, second.stage_s, second.verify_s, second.commit_s) > 0
        assert all(fleet.holds(engine, 1) for engine in (A, B, C))

    run_scripted(scenario())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.HANG, FaultKind.STUCK, FaultKind.CANCELLED])
def test_an_engine_that_fails_or_hangs_anywhere_is_fenced_and_the_rest_commit(fleet, place, kind):
    fleet = fleet(Fault(place=f"{place}.b", kind=kind, visit=1))

    async def scenario():
        await fleet.publish(0)
        report = await fleet.publish(1)
        assert report.committed == fleet.publisher.serving == (A, C)
        assert set(report.fenced) == {B}
        assert place.split(".")[0] in report.fenced[B]
        assert fleet.holds(A, 1)
        assert fleet.holds(C, 1)
        calls = len(fleet.engines[B].calls)
        later = await fleet.publish(2)
        assert later.fenced == {}
        assert len(fleet.engines[B].calls) == calls, "a fenced engine was called"

    run_scripted(scenario())


def test_a_delay_within_the_deadline_fences_nobody(fleet):
    fleet = fleet(Fault(place="stage.before.b", kind=FaultKind.DELAY, seconds=119.0))
    report = run_scripted(fleet.publish(0))
    assert report.committed == (A, B, C)


def test_a_digest_wrong_on_one_engine_fences_it_and_names_the_tensor(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        fleet.engines[B].plan(Wrong.FLIPPED, "q")
        report = await fleet.publish(1)
        assert report.committed == (A, C)
        assert "'q'" in report.fenced[B]
        assert fleet.holds(B, 0), "the corrupt version must not serve"

    run_scripted(scenario())


def test_a_digest_wrong_on_every_engine_cancels_and_the_parent_goes_on(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        for engine in fleet.engines.values():
            engine.plan(Wrong.FLIPPED, "embed")
        with pytest.raises(PayloadError, match=r"v1@1 is cancelled.*'embed'"):
            await fleet.publish(1)
        assert fleet.publisher.delivered.number == 0
        assert fleet.publisher.serving == (A, B, C)
        assert all(fleet.holds(engine, 0) for engine in (A, B, C))
        assert all(engine.inner.staged is None for engine in fleet.engines.values()), "not rolled back"
        assert (await fleet.publish(1)).committed == (A, B, C), "a number that was not delivered can be used"

    run_scripted(scenario())


@pytest.mark.parametrize("live", [(), (A, C), (A, B, C)])
def test_a_version_that_every_engine_refuses_to_stage_is_cancelled(fleet, live):
    fleet = fleet(live=live)

    async def scenario():
        await fleet.publish(0)
        for engine in fleet.engines.values():
            engine.plan(Wrong.REFUSED)
        with pytest.raises(PayloadError, match="told to refuse"):
            await fleet.publish(1)
        assert fleet.publisher.serving == (A, B, C)
        assert all(fleet.holds(engine, 0) for engine in (A, B, C))

    run_scripted(scenario())


def test_a_wrong_model_is_cancelled_by_name(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        tensors = weights(1)
        tensors["query"] = tensors.pop("q")
        with pytest.raises(PayloadError, match=r"'q'.*'query'"):
            await fleet.publisher.publish(tensors, 1, 1, InFlightMode.CONTINUE)
        assert all(fleet.holds(engine, 0) for engine in (A, B, C))

    run_scripted(scenario())


def test_an_engine_that_cannot_roll_back_is_fenced(fleet):
    fleet = fleet(Fault(place="rollback.before.c", kind=FaultKind.RAISE))

    async def scenario():
        await fleet.publish(0)
        for engine in fleet.engines.values():
            engine.plan(Wrong.FLIPPED, "embed")
        with pytest.raises(PayloadError):
            await fleet.publish(1)
        assert fleet.publisher.serving == (A, B)

    run_scripted(scenario())


def test_too_few_engines_before_the_commit_leave_the_parent_everywhere(fleet):
    fleet = fleet(Fault(place="verify.before.a", kind=FaultKind.RAISE, visit=1), min_engines=3)

    async def scenario():
        await fleet.publish(0)
        with pytest.raises(DeliveryError, match=r"2 engines.*3 are required.*a: verify failed"):
            await fleet.publish(1)
        assert fleet.publisher.delivered.number == 0
        assert fleet.publisher.serving == (B, C)
        assert all(fleet.holds(engine, 0) for engine in (A, B, C))
        assert fleet.engines[B].inner.staged is None
        await fleet.publisher.restore(fleet.engines[A])
        assert (await fleet.publish(1)).committed == (A, B, C)

    run_scripted(scenario())


def test_too_few_engines_after_the_commit_is_an_error_that_keeps_the_number_used(fleet):
    fleet = fleet(
        Fault(place="commit.after.a", kind=FaultKind.RAISE),
        Fault(place="commit.before.b", kind=FaultKind.RAISE),
        min_engines=2,
    )

    async def scenario():
        with pytest.raises(DeliveryError):
            await fleet.publish(0)
        assert fleet.publisher.delivered.number == 0
        assert fleet.publisher.serving == (C,)
        with pytest.raises(DeliveryError):
            await fleet.publish(1)
        await fleet.publisher.restore(fleet.engines[A])
        with pytest.raises(PayloadError, match="numbers never restart"):
            await fleet.publish(0)
        assert (await fleet.publish(1)).committed == (A, C)

    run_scripted(scenario())


def test_a_version_that_nobody_confirms_is_not_delivered(fleet):
    fleet = fleet(*(Fault(place=f"commit.after.{engine}", kind=FaultKind.RAISE, visit=1) for engine in (A, B, C)))

    async def scenario():
        first = await fleet.publish(0)
        with pytest.raises(DeliveryError):
            await fleet.publish(1)
        assert fleet.publisher.delivered == first.version
        assert fleet.publisher.serving == ()
        await fleet.publisher.restore(fleet.engines[A])
        assert fleet.publisher.serving == (A,)
        assert fleet.holds(A, 0)

    run_scripted(scenario())


def test_an_engine_that_commits_another_version_is_fenced(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        fleet.engines[C].plan(Wrong.MISNAMED)
        report = await fleet.publish(1)
        assert report.committed == (A, B)
        assert "committed v2@1 instead of v1@1" in report.fenced[C]

    run_scripted(scenario())


def test_closing_removes_the_bytes_and_can_be_repeated(fleet, tmp_path):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        await fleet.publisher.close()
        await fleet.publisher.close()
        assert list(tmp_path.iterdir()) == []
        assert fleet.holds(A, 0)

    run_scripted(scenario())


def test_numbers_never_restart(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(7)
        for number, incarnation in [(7, 1), (6, 1), (9, 0)]:
            with pytest.raises(PayloadError, match="numbers never restart"):
                await fleet.publish(number, incarnation)
        resumed = await fleet.publish(7, 2)
        assert resumed.version.incarnation == 2
        assert resumed.parent.name == "v7@1"
        assert (await fleet.publish(10, 2)).parent == resumed.version

    run_scripted(scenario())


def test_a_fenced_engine_returns_only_by_a_full_verified_reload(fleet):
    fleet = fleet(Fault(place="stage.before.b", kind=FaultKind.RAISE, visit=1))

    async def scenario():
        await fleet.publish(0)
        await fleet.publish(1)
        fleet.engines[B].plan(Wrong.FLIPPED, "k")
        with pytest.raises(EngineError, match=r"b: cannot be restored.*'k'"):
            await fleet.publisher.restore(fleet.engines[B])
        assert fleet.publisher.serving == (A, C)
        await fleet.publisher.restore(fleet.engines[B])
        assert fleet.publisher.serving == (A, B, C)
        assert fleet.publisher.fenced == {}
        assert fleet.holds(B, 1)

    run_scripted(scenario())


def test_a_replacement_or_a_new_engine_is_taken_in(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        fleet.publisher.fence(B, "its process ended")
        assert fleet.publisher.serving == (A, C)
        fleet.engines[B] = receiver(B)
        await fleet.publisher.restore(fleet.engines[B])
        fleet.engines["d"] = receiver("d")
        await fleet.publisher.restore(fleet.engines["d"])
        assert fleet.publisher.serving == (A, B, C, "d")
        assert fleet.holds("d", 0)

    run_scripted(scenario())


def test_an_engine_that_dies_while_it_is_restored_stays_fenced(fleet):
    fleet = fleet(Fault(place="commit.after.b", kind=FaultKind.DELAY, seconds=0.05, visit=1))

    async def scenario():
        await fleet.publish(0)
        restoring = asyncio.create_task(fleet.publisher.restore(fleet.engines[B]))
        await asyncio.sleep(0.02)
        fleet.publisher.fence(B, "its process ended")
        with pytest.raises(EngineError, match="its process ended"):
            await restoring
        assert fleet.publisher.serving == (A, C)

    run_scripted(scenario())


def test_an_engine_that_failed_before_the_first_delivery_can_take_part_in_it(fleet):
    faults = [Fault(place=f"stage.before.{engine}", kind=FaultKind.RAISE) for engine in (A, B, C)]
    fleet = fleet(*faults)

    async def scenario():
        with pytest.raises(DeliveryError):
            await fleet.publish(0)
        assert fleet.publisher.delivered is None
        await fleet.publisher.restore(fleet.engines[A])
        assert fleet.publisher.serving == ()
        assert (await fleet.publish(0)).committed == fleet.publisher.serving == (A,)

    run_scripted(scenario())


def test_an_engine_that_cannot_prove_its_memory_does_not_serve(fleet):
    fleet = fleet()
    fleet.engines[A].plan(Wrong.BEHAVIOURAL)
    report = run_scripted(fleet.publish(0))
    assert report.committed == (B, C)
    assert "nothing proves" in report.fenced[A]


@pytest.mark.parametrize("place", ["hold.before", "hold.after"])
def test_a_write_that_hangs_is_a_delivery_error_and_nothing_changes(fleet, place):
    fleet = fleet(Fault(place=place, kind=FaultKind.HANG, visit=1))

    async def scenario():
        await fleet.publish(0)
        with pytest.raises(DeliveryError, match="did not hold v1@1 within"):
            await fleet.publish(1)
        assert fleet.publisher.serving == (A, B, C)
        assert (await fleet.publish(1)).committed == (A, B, C)

    run_scripted(scenario())


def test_a_publication_cancelled_during_the_commit_fences_who_did_not_confirm(fleet):
    fleet = fleet(Fault(place="commit.after.b", kind=FaultKind.HANG, visit=1))

    async def scenario():
        await fleet.publish(0)
        task = asyncio.create_task(fleet.publish(1))
        while min(fleet.faults.reached.count(f"commit.after.{engine}") for engine in (A, B, C)) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.publisher.delivered.number == 1
        assert fleet.publisher.serving == (A, C)
        assert "interrupted" in fleet.publisher.fenced[B]

    run_scripted(scenario())


def test_publications_take_turns(fleet):
    fleet = fleet(Fault(place="stage.before.a", kind=FaultKind.DELAY, seconds=0.05))

    async def scenario():
        first, second = await asyncio.gather(fleet.publish(0), fleet.publish(1))
        assert second.parent == first.version
        assert all(fleet.holds(engine, 1) for engine in (A, B, C))

    run_scripted(scenario())


def test_a_long_chain_uses_two_shared_files(fleet, tmp_path):
    fleet = fleet()

    async def scenario():
        for number in range(10):
            await fleet.publish(number)
            if number % 3 == 2:
                for engine in fleet.engines.values():
                    engine.plan(Wrong.FLIPPED, "embed")
                with pytest.raises(PayloadError):
                    await fleet.publisher.publish(weights(99), number + 1, 1, InFlightMode.CONTINUE)
        assert len(list(tmp_path.iterdir())) == 2

    run_scripted(scenario())


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (Wrong.MISCOUNTED, "says it received 71 bytes by moving 72; v1@1 has 72"),
        (Wrong.MISDIGESTED, "digest 0000"),
        (Wrong.MISNAMED, "committed v2@1 instead of v1@1"),
    ],
)
def test_an_engine_that_reports_something_else_than_it_has_is_fenced(fleet, lie, said):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        fleet.engines[B].plan(lie)
        report = await fleet.publish(1)
        assert report.committed == (A, C)
        assert said in report.fenced[B]

    run_scripted(scenario())


def test_an_engine_lost_between_stage_and_commit_is_fenced_and_replaced(fleet):
    fleet = fleet()

    async def scenario():
        await fleet.publish(0)
        fleet.engines[B].plan(Wrong.LOST)
        report = await fleet.publish(1)
        assert report.committed == (A, C)
        assert "EngineDeadError" in report.fenced[B]
        with pytest.raises(EngineError, match="cannot be restored"):
            await fleet.publisher.restore(fleet.engines[B])
        fleet.engines[B] = receiver(B)
        await fleet.publisher.restore(fleet.engines[B])
        assert fleet.publisher.serving == (A, B, C)
        assert fleet.holds(B, 1)

    run_scripted(scenario())


def test_an_engine_that_says_a_transfer_broke_when_there_is_none_is_not_committed_unverified(fleet):
    fleet = fleet(Fault(place="verify.before.b", kind=FaultKind.INTERRUPTED, visit=1))

    async def scenario():
        await fleet.publish(0)
        report = await fleet.publish(1)
        assert report.committed == (A, C)
        assert fleet.publisher.fenced.keys() == {B}
        assert fleet.holds(B, 0)

    run_scripted(scenario())


def test_one_engine_that_always_says_the_transfer_broke_cannot_stop_the_others(fleet):
    fleet = fleet(*(Fault(place="stage.before.b", kind=FaultKind.INTERRUPTED, visit=visit) for visit in range(1, 9)))

    async def scenario():
        await fleet.publish(0)
        report = await fleet.publish(1)
        assert report.committed == (A, C)
        assert set(report.fenced) == {B}

    run_scripted(scenario())


def test_a_transfer_that_breaks_for_all_twice_is_a_delivery_error_and_fences_nobody(fleet):
    faults = [
        Fault(place=f"stage.before.{name}", kind=FaultKind.INTERRUPTED, visit=each)
        for name in (A, B, C)
        for each in (1, 2)
    ]
    fleet = fleet(*faults, live=(B,))

    async def scenario():
        await fleet.publish(0)
        with pytest.raises(DeliveryError, match=r"v1@1 broke twice"):
            await fleet.publish(1)
        assert fleet.publisher.serving == (A, B, C)
        assert all(fleet.holds(engine, 0) for engine in (A, B, C))
        assert (await fleet.publish(1)).committed == (A, B, C)

    run_scripted(scenario())


@pytest.mark.parametrize(
    "place", ["stage.before.b", "stage.after.b", "b/receive.before", "verify.before.a", "offer.before"]
)
def test_a_live_engine_is_fenced_when_what_it_served_is_overwritten_and_the_publication_is_cancelled(fleet, place):
    fleet = fleet(Fault(place=place, kind=FaultKind.HANG, visit=1), live=(B,))

    async def scenario():
        await fleet.publish(0)
        task = asyncio.create_task(fleet.publish(1))
        while fleet.faults.reached.count(place) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        whole = place in ("offer.before", "stage.before.b")
        assert fleet.publisher.serving == ((A, B, C) if whole else (A, C))
        assert fleet.holds(B, 0 if whole else None)
        assert whole or "written over what it served" in fleet.publisher.fenced[B]
        await fleet.publisher.restore(fleet.engines[B])
        assert fleet.publisher.serving == (A, B, C)

    run_scripted(scenario())


def test_a_live_engine_reports_its_pause_from_the_first_byte_on(fleet):
    fleet = fleet(live=(A, B, C))

    async def scenario():
        await fleet.publish(0)
        report = await fleet.publish(1)
        assert report.pause_s > report.verify_s

    run_scripted(scenario())


def test_two_engines_of_one_name_are_refused(tmp_path):
    transport = SharedTransport(tmp_path, memory_folder=tmp_path)
    with pytest.raises(ValueError, match="same name"):
        Publisher([receiver(A), receiver(A)], transport, SyncConfig())
    transport.close()


def test_an_engine_restored_while_it_serves_is_out_of_service_until_it_is_proven(fleet):
    fleet = fleet(Fault(place="verify.before.b", kind=FaultKind.DELAY, seconds=5.0, visit=1))

    async def scenario():
        await fleet.publish(0)
        restoring = asyncio.create_task(fleet.publisher.restore(fleet.engines[B]))
        await asyncio.sleep(1)
        assert fleet.publisher.serving == (A, C)
        await restoring
        assert fleet.publisher.serving == (A, B, C)

    run_scripted(scenario())


def test_a_restoration_that_is_cancelled_leaves_the_engine_fenced(fleet):
    fleet = fleet(Fault(place="verify.before.b", kind=FaultKind.HANG, visit=1))

    async def scenario():
        await fleet.publish(0)
        restoring = asyncio.create_task(fleet.publisher.restore(fleet.engines[B]))
        await asyncio.sleep(1)
        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        assert fleet.publisher.serving == (A, C)
        await fleet.publisher.restore(fleet.engines[B])
        assert fleet.publisher.serving == (A, B, C)

    run_scripted(scenario())
