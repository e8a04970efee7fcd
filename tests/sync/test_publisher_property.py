"""Random faults at every await point over random chains of publications: never a wrong weight in service."""

import asyncio
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.families import FabricKind, TransportKind
from fathom.config.sync import BroadcastConfig, PeerConfig, SyncConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import digest
from fathom.sync.faults.faulty_receiver import FaultyReceiver, Misdeed, Wrong
from fathom.sync.faults.faulty_transport import FaultyTransport, Mishap, MishapAt
from fathom.sync.faults.scripted_clock import run_scripted
from fathom.sync.faults.scripted_faults import Fault, FaultKind, InjectedError, ScriptedFaults
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

ENGINES = [EngineId("a"), EngineId("b"), EngineId("c")]
PHASES = ["stage", "verify", "commit", "rollback"]
WHEN = ["before", "after"]
ENGINE_PLACES = [
    *(f"{phase}.{when}.{engine}" for phase in PHASES for when in WHEN for engine in ENGINES),
    *(f"{engine}/receive.{when}" for engine in ENGINES for when in WHEN),
]
TRANSPORT_PLACES = [f"{call}.{when}" for call in ("hold", "offer") for when in WHEN]
TIMEOUT_S = 60.0
CONFIGS = {kind: SyncConfig(transport=kind, timeout_s=TIMEOUT_S) for kind in TransportKind} | {
    TransportKind.BROADCAST: SyncConfig(
        transport=TransportKind.BROADCAST, timeout_s=TIMEOUT_S, broadcast=BroadcastConfig(stall_s=0.3)
    ),
    TransportKind.P2P: SyncConfig(
        transport=TransportKind.P2P, timeout_s=TIMEOUT_S, p2p=PeerConfig(fabric=FabricKind.MEMORY)
    ),
}
EXAMPLES = {TransportKind.SHARED: 60, TransportKind.DISK: 25}
DEFAULT_EXAMPLES = 8
WRONG_MODELS = ["renamed", "recast", "reshaped", "missing", "added"]


def weights(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 2), number + place / 8).bfloat16() for place, name in enumerate(("embed", "q"))}


def wrong(number: int, how: str) -> dict[str, torch.Tensor]:
    """Weights of another model, which no engine here may take."""
    tensors = weights(number)
    match how:
        case "renamed":
            tensors["query"] = tensors.pop("q")
        case "recast":
            tensors["q"] = tensors["q"].half()
        case "reshaped":
            tensors["q"] = tensors["q"].t().contiguous()
        case "missing":
            del tensors["q"]
        case "added":
            tensors["q.scale"] = torch.ones(3)
    return tensors


DIGESTS = {number: digest(weights(number)) for number in range(12)}


class Watched:
    """Looks at the whole fleet at every await point, then lets the script go on."""

    def __init__(self, script: ScriptedFaults, look, prefix: str = "") -> None:
        self._script, self._look, self._prefix = script, look, prefix

    async def reach(self, place: str) -> None:
        self._look()
        await self._script.reach(self._prefix + place)
        self._look()


class Heard:
    """Who serves what by what the publisher says of it. It must say so of everybody, and take it back."""

    def __init__(self) -> None:
        self.serving = {}

    def doubts(self, engine) -> None:
        pass

    def serves(self, engine, version) -> None:
        self.serving[engine] = version

    def fenced(self, engine, reason) -> None:
        self.serving.pop(engine, None)


class World:
    def __init__(self, folder, kind, live, script=(), misdeeds=(), mishaps=(), min_engines=1) -> None:
        faults = ScriptedFaults(*script)
        self.live = set(live)
        self.misdeeds = dict(misdeeds)
        self.watch = {name: Watched(faults, self.look, f"{name}/") for name in ENGINES}
        self.engines = {name: self.launch(name) for name in ENGINES}
        self.receivers = list(self.engines.values())
        transport = FaultyTransport(TRANSPORTS[kind](folder, CONFIGS[kind]), *mishaps)
        config = CONFIGS[kind].model_copy(update={"min_engines": min_engines})
        self.heard = Heard()
        self.publisher = Publisher(
            list(self.engines.values()), transport, config, Watched(faults, self.look), self.heard
        )
        self.known: set[int] = set()
        self.looks = 0
        self.violations: list[str] = []

    def launch(self, name: EngineId) -> FaultyReceiver:
        into = ReceivesInto.LIVE if name in self.live else ReceivesInto.STAGING
        return FaultyReceiver(MemoryReceiver(name, weights(0), self.watch[name], into), *self.misdeeds.pop(name, ()))

    def look(self) -> None:
        """Whoever may serve holds a whole version: the delivered one, or the one being committed; or it is paused.

        Findings are kept, not raised: at an await point the protocol would take an error for an engine's.
        """
        self.looks += 1
        for name in self.publisher.serving:
            engine = self.engines[name].inner
            version = engine.version
            if version is None:
                if name not in self.live:
                    self.violations.append(f"{name} serves nothing and is in service")
                continue
            held = digest(engine.weights)
            if version.number not in self.known or not held == version.digest == DIGESTS[version.number]:
                self.violations.append(f"{name} serves {held} as {version}; allowed are {self.known}")

    def settled(self) -> None:
        """Between publications every serving engine holds exactly the delivered version."""
        self.look()
        assert not self.violations
        serving, delivered = self.publisher.serving, self.publisher.delivered
        assert all(self.engines[name].inner.version == delivered for name in serving)
        assert self.heard.serving == dict.fromkeys(serving, delivered)
        assert set(serving) | set(self.publisher.fenced) == set(ENGINES) or not delivered

    async def publish(self, number: int, tensors=None) -> None:
        before = self.publisher.delivered
        self.known = {number} | ({before.number} if before else set())
        try:
            report = await self.publisher.publish(tensors or weights(number), number, 1, InFlightMode.CONTINUE)
        except PayloadError:
            assert self.publisher.delivered == before
        except (DeliveryError, InjectedError):
            assert self.publisher.delivered == before or self.publisher.delivered.number == number
        else:
            assert tensors is None, "a version of another model was delivered"
            assert self.publisher.delivered == report.version
            assert report.version.number == number
            assert report.committed == self.publisher.serving
            assert len(report.committed) >= 1
        self.settled()

    async def restore(self, name: EngineId) -> None:
        """As it is, or by a new process when it is gone."""
        if self.engines[name].lost:
            self.engines[name] = self.launch(name)
            self.receivers.append(self.engines[name])
        try:
            await self.publisher.restore(self.engines[name])
        except EngineError:
            assert name in self.publisher.fenced
        else:
            assert name not in self.publisher.fenced
        self.settled()

    async def run(self, steps) -> None:
        try:
            for number, step in enumerate(steps):
                if step == "publish":
                    await self.publish(number)
                elif step in WRONG_MODELS:
                    await self.publish(number, wrong(number, step))
                else:
                    await self.restore(step)
            assert self.looks > 0
        finally:
            await self.close()

    async def close(self) -> None:
        await self.publisher.close()
        for receiver in self.receivers:
            receiver.inner.close()


def fault(places, kinds):
    return st.builds(
        Fault,
        place=st.sampled_from(places),
        kind=st.sampled_from(kinds),
        seconds=st.sampled_from([0.0, 1.0, TIMEOUT_S + 1]),
        visit=st.integers(0, 3),
    )


faults = st.one_of(
    fault(ENGINE_PLACES, [FaultKind.RAISE, FaultKind.DELAY, *FaultKind]),
    fault(ENGINE_PLACES, [FaultKind.RAISE, FaultKind.DELAY, *FaultKind]),
    fault(TRANSPORT_PLACES, [kind for kind in FaultKind if kind is not FaultKind.STUCK]),
)
misdeeds = st.dictionaries(
    st.sampled_from(ENGINES),
    st.lists(st.builds(Misdeed, what=st.sampled_from(list(Wrong)), stage=st.integers(0, 3)), max_size=3),
)
mishaps = st.lists(
    st.builds(
        MishapAt, what=st.sampled_from(list(Mishap)), call=st.sampled_from(["hold", "offer"]), visit=st.integers(0, 4)
    ),
    max_size=2,
)
steps = st.lists(
    st.one_of(
        st.just("publish"), st.just("publish"), st.just("publish"), st.sampled_from([*ENGINES, *ENGINES, *WRONG_MODELS])
    ),
    min_size=3,
    max_size=9,
)


def exercise(kind: TransportKind, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        script=st.lists(faults, min_size=1, max_size=6),
        misdeeds=misdeeds,
        mishaps=mishaps,
        steps=steps,
        live=st.sets(st.sampled_from(ENGINES)),
        min_engines=st.integers(1, 3),
    )
    def any_world(script, misdeeds, mishaps, steps, live, min_engines):
        async def scenario(folder: Path) -> None:
            await World(folder, kind, live, script, misdeeds, mishaps, min_engines).run(steps)

        with tempfile.TemporaryDirectory() as folder:
            run_scripted(scenario(Path(folder)))

    any_world()


@pytest.mark.parametrize("kind", list(TransportKind))
def test_every_engine_holds_the_old_or_the_new_version_whole_or_is_fenced(kind):
    exercise(kind, EXAMPLES.get(kind, DEFAULT_EXAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", list(TransportKind))
def test_every_engine_holds_the_old_or_the_new_version_whole_or_is_fenced_at_length(kind):
    exercise(kind, 10 * EXAMPLES.get(kind, DEFAULT_EXAMPLES))


A, B = ENGINES[0], ENGINES[1]
STEPS = ["publish", "publish", "renamed", "publish", *ENGINES, "publish"]


def play(live=(), **world) -> None:
    """One chain: two versions, one of another model, one more, all engines restored, and a last one."""

    async def scenario(folder: Path) -> None:
        await World(folder, TransportKind.SHARED, live, **world).run(STEPS)

    with tempfile.TemporaryDirectory() as folder:
        run_scripted(scenario(Path(folder)))


@pytest.mark.parametrize("kind", list(FaultKind))
def test_one_fault_at_each_await_point(kind):
    places = [*ENGINE_PLACES, *(TRANSPORT_PLACES if kind is not FaultKind.STUCK else ())]
    for place in [place for place in places if ENGINES[2] not in place.replace("/", ".").split(".")]:
        script = [Fault(place=place, kind=kind, seconds=TIMEOUT_S + 1, visit=0 if "rollback" in place else 1)]
        play(live={B}, script=script)


@pytest.mark.parametrize("what", list(Wrong))
@pytest.mark.parametrize("who", [(A,), (B,), (A, B), tuple(ENGINES)])
def test_one_misdeed_of_some_or_all_engines(what, who):
    for stage in (0, 1):
        play(live={B}, misdeeds={engine: [Misdeed(what=what, stage=stage)] for engine in who})


@pytest.mark.parametrize("what", list(Mishap))
@pytest.mark.parametrize("call", ["hold", "offer"])
def test_one_mishap_of_the_transport(what, call):
    for visit in range(4):
        play(live={B}, mishaps=[MishapAt(what=what, call=call, visit=visit)])


@settings(max_examples=60, deadline=None)
@given(ticks=st.lists(st.integers(0, 60), min_size=1, max_size=3), live=st.sets(st.sampled_from(ENGINES)))
def test_a_publication_cancelled_at_any_moment_leaves_no_wrong_weight(ticks, live):
    """At any turn of the event loop: every one in which the publication stands between two of its steps."""

    async def scenario(folder: Path) -> None:
        world = World(folder, TransportKind.SHARED, live)
        try:
            await world.publish(0)
            for number, turns in enumerate(ticks, start=1):
                task = asyncio.create_task(world.publish(number))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                world.settled()
                for name in list(world.publisher.fenced):
                    await world.restore(name)
                assert world.publisher.serving == tuple(ENGINES)
        finally:
            await world.close()

    with tempfile.TemporaryDirectory() as folder:
        run_scripted(scenario(Path(folder)))
