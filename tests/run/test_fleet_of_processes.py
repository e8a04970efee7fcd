"""Show 5: three real engines; one is killed, one stopped, one answers 500, one is sent a wrong tensor, one joins."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from small_runs import digests, require_sound, small_config
from typer.testing import CliRunner

from fathom import Run
from fathom.apps.cli.main import app
from fathom.core.ports.engine import Engine
from fathom.ledger.events import EngineFenced, EngineJoined, EngineRestored, Event, Published, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.faulty_wire import FaultyWire, WireFault
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.run.weights.requests import JoinRequest, RequestBox

pytestmark = pytest.mark.slow

_LARGEST_GAP = 1e-3
"""Nats between engine and trainer at one and the same version in float32: far above rounding."""


class Works:
    """Starts engines with a faulty wire, and does things to them when something has happened in the run."""

    def __init__(self) -> None:
        self.engines: dict[str, list[EmbeddedEngine]] = defaultdict(list)
        self.wires: dict[str, list[FaultyWire]] = defaultdict(list)
        self._plan: list[tuple[type[Event], int, Callable[[], None]]] = []
        self._seen: defaultdict[type, int] = defaultdict(int)

    async def launch(self, spec: EmbeddedSpec) -> Engine:
        def wire(inner: httpx.AsyncBaseTransport) -> FaultyWire:
            self.wires[spec.engine].append(FaultyWire(inner))
            return self.wires[spec.engine][-1]

        engine = await EmbeddedEngine.launch(spec, wire)
        self.engines[spec.engine].append(engine)
        return engine

    def after(self, kind: type[Event], count: int, act: Callable[[], None]) -> None:
        self._plan.append((kind, count, act))

    def observe(self, event: Event) -> None:
        self._seen[type(event)] += 1
        for act in [act for kind, count, act in self._plan if kind is type(event) and count == self._seen[kind]]:
            act()

    def kill(self, name: str, number: signal.Signals) -> None:
        os.kill(self.engines[name][-1].process.pid, number)

    def spoil(self, name: str, fault: WireFault) -> None:
        self.wires[name][-1].fault = fault


@pytest.mark.timeout(900)
def test_show_five(tmp_path: Path) -> None:
    works = Works()
    works.after(StepTaken, 3, lambda: works.kill("engine-0", signal.SIGKILL))
    works.after(StepTaken, 3, lambda: RequestBox.of(next((tmp_path / "runs").iterdir())).post(JoinRequest()) and None)
    works.after(EngineRestored, 1, lambda: works.spoil("engine-1", WireFault.ANSWERS_500))
    works.after(EngineRestored, 2, lambda: works.kill("engine-2", signal.SIGSTOP))
    works.after(EngineRestored, 3, lambda: works.spoil("engine-0", WireFault.WRONG_TENSOR))
    options = "engine.count=3", "engine.health_timeout_s=3", "staleness.max_staleness=2", "trainer.steps=300"
    result = Run(small_config(tmp_path, *options)).start([works.observe], launcher=works.launch)
    assert result.reason == "steps"
    require_sound(result.folder)
    assert len(digests(result.folder)) == 300

    with LedgerReader(result.folder / "ledger") as reader:
        fences = [entry.event for entry in reader.events(EngineFenced)]
        words = (
            ("engine-0", "exit code -9"),
            ("engine-1", "HTTP 500"),
            ("engine-2", "a look"),
            ("engine-0", "wrong tensors"),
        )
        assert [(fence.engine, text in fence.reason) for fence, (_, text) in zip(fences, words, strict=True)] == [
            (engine, True) for engine, _ in words
        ]
        assert [entry.event.engine for entry in reader.events(EngineRestored)] == [engine for engine, _ in words]
        assert [entry.event.engine for entry in reader.events(EngineJoined) if entry.event.asked] == ["engine-3"]
        last = reader.latest(Published)
        assert last is not None
        assert set(last.event.committed) == {f"engine-{number}" for number in range(4)}
        gaps = [entry.event.gap.abs_log_ratio_max for entry in reader.events(Published) if entry.event.gap]
        assert max(gaps) < _LARGEST_GAP
        fresh = [
            part.mismatch.abs_log_ratio_max
            for entry in reader.events(StepTaken)
            for part in entry.event.slices
            if part.age == part.kv_age == 0
        ]
        assert max(fresh, default=0.0) < _LARGEST_GAP
    shown = CliRunner().invoke(app, ["show", str(result.folder)])
    assert shown.exit_code == 0
    assert "engines" in shown.output
