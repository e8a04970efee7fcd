"""Random faults at every await point over random chains of publications: never a wrong weight in service."""

import asyncio
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.sync import SyncConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import digest
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.publisher import Publisher
from fathom.sync.faults.scripted_faults import Fault, FaultKind, InjectedError, ScriptedFaults
from fathom.sync.transports.shared import SharedTransport

ENGINES = [EngineId("a"), EngineId("b"), EngineId("c")]
PHASES = ["stage", "verify", "commit", "rollback"]
WHEN = ["before", "after"]
PLACES = [
    *(f"{phase}.{when}.{engine}" for phase in PHASES for when in WHEN for engine in ENGINES),
    *(f"{engine}/receive.{when}" for engine in ENGINES for when in WHEN),
    *(f"{call}.{when}" for call in ("hold", "offer") for when in WHEN),
]


def weights(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 2), float(number)).bfloat16() for name in ("embed", "q")}


DIGESTS = {number: digest(weights(number)) for number in range(12)}


class Watched:
    """Looks at the whole fleet at every await point, then lets the script go on."""

    def __init__(self, script: ScriptedFaults, look, prefix: str = "") -> None:
        self._script, self._look, self._prefix = script, look, prefix

    async def reach(self, place: str) -> None:
        self._look()
        await self._script.reach(self._prefix + place)
        self._look()


class World:
    def __init__(self, folder: Path, script: list[Fault], min_engines: int) -> None:
        faults = ScriptedFaults(*script)
        self.engines = {
            name: MemoryReceiver(name, weights(0), Watched(faults, self.look, f"{name}/")) for name in ENGINES
        }
        self.transport = SharedTransport(folder, memory_folder=folder)
        config = SyncConfig(min_engines=min_engines, timeout_s=0.15)
        self.publisher = Publisher(list(self.engines.values()), self.transport, config, Watched(faults, self.look))
        self.known: set[int] = set()
        self.looks = 0
        self.violations: list[str] = []

    def look(self) -> None:
        """Whoever may serve holds a whole version: the delivered one, or the one being committed.

        Findings are kept, not raised: at an await point the protocol would take an error for an engine's.
        """
        self.looks += 1
        for name in self.publisher.serving:
            version = self.engines[name].version
            held = digest(self.engines[name].weights)
            if (
                version is None
                or version.number not in self.known
                or not held == version.digest == DIGESTS[version.number]
            ):
                self.violations.append(f"{name} serves {held} as {version}; allowed are {self.known}")

    def settled(self) -> None:
        """Between publications every serving engine holds exactly the delivered version."""
        self.look()
        assert not self.violations
        assert all(self.engines[name].version == self.publisher.delivered for name in self.publisher.serving)
        assert set(self.publisher.serving) | set(self.publisher.fenced) == set(ENGINES) or not self.publisher.delivered

    async def publish(self, number: int) -> None:
        before = self.publisher.delivered
        self.known = {number} | ({before.number} if before else set())
        try:
            report = await self.publisher.publish(weights(number), number, 1, InFlightMode.CONTINUE)
        except PayloadError:
            assert self.publisher.delivered == before
        except (DeliveryError, InjectedError):
            assert self.publisher.delivered == before or self.publisher.delivered.number == number
        else:
            assert self.publisher.delivered == report.version
            assert report.version.number == number
            assert report.committed == self.publisher.serving
            assert len(report.committed) >= 1
        self.settled()

    async def restore(self, name: EngineId) -> None:
        try:
            await self.publisher.restore(self.engines[name])
        except EngineError:
            assert name in self.publisher.fenced
        else:
            assert name not in self.publisher.fenced
        self.settled()


faults = st.builds(
    Fault,
    place=st.sampled_from(PLACES),
    kind=st.sampled_from([FaultKind.RAISE] * 4 + [FaultKind.DELAY] * 4 + [FaultKind.HANG]),
    seconds=st.sampled_from([0.0, 0.001]),
    visit=st.integers(0, 5),
)
steps = st.lists(st.one_of(st.just("publish"), st.just("publish"), st.sampled_from(ENGINES)), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(script=st.lists(faults, max_size=10), steps=steps, min_engines=st.integers(1, 3))
def test_every_engine_holds_the_old_or_the_new_version_whole_or_is_fenced(script, steps, min_engines):
    async def scenario(folder: Path) -> None:
        world = World(folder, script, min_engines)
        try:
            for number, step in enumerate(steps):
                if step == "publish":
                    await world.publish(number)
                else:
                    await world.restore(step)
            assert world.looks > 0
        finally:
            await world.publisher.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


@settings(max_examples=40, deadline=None)
@given(delay=st.floats(0.0, 0.006), steps=st.integers(1, 3))
def test_a_publication_cancelled_at_any_moment_leaves_no_wrong_weight(delay, steps):
    async def scenario(folder: Path) -> None:
        world = World(folder, [], 1)
        try:
            await world.publish(0)
            for number in range(1, steps + 1):
                task = asyncio.create_task(world.publish(number))
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                world.settled()
        finally:
            await world.publisher.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
