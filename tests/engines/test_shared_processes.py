"""One process with several adapters: each engine in it is as if it were alone, but for the process itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted import scored, serve, trained
from shelf import Shelf, tiny_folder

from fathom.config.lora import LoraConfig
from fathom.core.errors import EngineError, EngineRefusedError, PayloadError
from fathom.core.ids import EngineId
from fathom.rollout.engines.conformance import Subject
from fathom.rollout.engines.conformance.subject import PROMPT, Generated
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.embedded.shared_processes import SharedProcesses
from fathom.sync.transports.shared import SharedTransport

FORMS = (
    LoraConfig(rank=4, alpha=12.0).form("left"),
    LoraConfig(rank=2, alpha=6.0, rslora=True, target_modules=("q_proj", "v_proj")).form("right"),
)


@dataclass
class Lane:
    """An adapter: its engine in the process, and the trainer's model of it."""

    spec: EmbeddedSpec
    shelf: Shelf
    engine: EmbeddedEngine
    subject: Subject

    async def published(self, number: int) -> np.ndarray:
        await serve(self.engine, *await self.shelf.publish(number))
        return await scored(self.engine, f"score {self.spec.adapter} {number}")

    def wanted(self, number: int, tokens: np.ndarray | None = None) -> np.ndarray:
        weights = self.shelf.weights(number)
        return trained(self.shelf.model, weights) if tokens is None else trained(self.shelf.model, weights, tokens)


@dataclass
class Rig:
    processes: SharedProcesses
    lanes: tuple[Lane, Lane]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@asynccontextmanager
async def opened(folder: Path, run: Path) -> AsyncGenerator[Rig]:
    transport = SharedTransport(run)
    processes = SharedProcesses(FORMS, run, max_context_tokens=192)
    lanes: list[Lane] = []
    for form in FORMS:
        shelf = Shelf(folder, transport, torch.float32, True, form)
        spec = EmbeddedSpec(
            engine=EngineId("e0"),
            model_folder=folder,
            log_path=run / f"{form.name}.log",
            max_context_tokens=150,
            max_running=16,
            adapter=form,
            aligned=True,
        )
        engine = await processes.launch(spec)
        assert isinstance(engine, EmbeddedEngine)
        lanes.append(Lane(spec, shelf, engine, Subject(engine, shelf.publish, shelf.model.shape.vocab_size, 0.0)))
    try:
        yield Rig(processes, (lanes[0], lanes[1]))
    finally:
        for lane in lanes:
            await lane.engine.close()
        transport.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner) -> Iterator[Rig]:
    opening = opened(tiny_folder(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("run"))
    yield runner.run(opening.__aenter__())
    runner.run(opening.__aexit__(None, None, None))


def pid(engine: EmbeddedEngine) -> int:
    assert engine.process is not None
    return engine.process.pid


def test_each_is_base_and_its_own_adapter_to_the_bit(rig: Rig, runner: asyncio.Runner) -> None:
    """A new version of one leaves what the other says unchanged, and cancels nothing there."""

    async def run() -> None:
        left, right = rig.lanes
        assert pid(left.engine) == pid(right.engine)
        first = await left.published(1)
        assert (await right.engine.status()).version is None
        other = await right.published(1)
        assert np.array_equal(first, left.wanted(1))
        assert np.array_equal(other, right.wanted(1))
        assert np.abs(first - other).max() > 1e-3
        second = await left.published(2)
        assert np.array_equal(second, left.wanted(2))
        assert np.abs(second - first).max() > 1e-3
        assert np.array_equal(await scored(right.engine, "again"), other)
        versions = [(await lane.engine.status()).version for lane in rig.lanes]
        assert [version.number for version in versions if version] == [2, 1]

    runner.run(run())


def test_no_prefix_is_shared_and_rows_of_both_run_at_once(rig: Rig, runner: asyncio.Runner) -> None:
    async def play(lane: Lane, count: int) -> list[Generated]:
        return await asyncio.gather(
            *(lane.subject.run(lane.subject.request(prompt=PROMPT * 5, seed=seed)) for seed in range(count))
        )

    async def run() -> None:
        left, right = rig.lanes
        await left.published(11)
        await right.published(11)
        (alone,) = await play(left, 1)
        (fresh,) = await play(right, 1)
        assert fresh.end.cached_tokens == 0, "the same prompt was computed for the other adapter"
        assert (await play(right, 1))[0].end.cached_tokens > 0
        both = await asyncio.gather(play(left, 6), play(right, 6))
        assert both[0][0].text == alone.text
        for lane, generations in zip(rig.lanes, both, strict=True):
            for each in generations:
                whole = lane.wanted(11, each.context)
                assert np.array_equal(whole[-len(each.logprobs) :], each.logprobs)

    runner.run(run())


def test_a_version_of_the_other_adapter_is_refused(rig: Rig, runner: asyncio.Runner) -> None:
    async def run() -> None:
        left, right = rig.lanes
        before = await right.published(21)
        with pytest.raises((EngineRefusedError, PayloadError), match="another adapter: name left instead of right"):
            await right.engine.stage(*await left.shelf.publish(22))
        assert np.array_equal(await scored(right.engine, "after"), before)

    runner.run(run())


def test_one_leaves_and_the_other_goes_on_until_the_process_is_given_up(
    rig: Rig, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def run() -> None:
        async with opened(rig.lanes[0].spec.model_folder, tmp_path) as own:
            left, right = own.lanes
            wanted = await right.published(1)
            await left.engine.close()
            await left.engine.close()
            assert np.array_equal(await scored(right.engine, "alone"), wanted)
            replaced = await own.processes.launch(left.spec)
            assert isinstance(replaced, EmbeddedEngine)
            with pytest.raises(EngineError):
                await right.engine.health()
            again = await own.processes.launch(right.spec)
            assert isinstance(again, EmbeddedEngine)
            assert pid(again) == pid(replaced) != pid(right.engine)
            await replaced.close()
            await again.health()
            await again.close()
            assert again.process is not None
            assert not again.process.alive

    runner.run(run())
