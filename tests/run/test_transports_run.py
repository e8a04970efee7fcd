"""Whole runs over every lossless transport: the same bits at every step, and engines that die are loaded again."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_runs import DETERMINISTIC, digests, require_sound, small_config

from fathom import Run
from fathom.core.ports.engine import Engine
from fathom.ledger.events import EngineFenced, EngineRestored, Event, Published, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec

pytestmark = pytest.mark.slow

NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="NIXL is not installed, see docs/how-to/p2p.md")
TRANSPORTS = ["disk", "broadcast", pytest.param("p2p", marks=[pytest.mark.p2p, NIXL]), "delta"]
"""Lossless ones, each compared with `shared`."""
EMBEDDED = "engine.kind=embedded"


def play(folder: Path, transport: str) -> Path:
    config = small_config(folder / transport, EMBEDDED, f"sync.transport={transport}", *DETERMINISTIC)
    result = Run(config).start()
    assert result.reason == "steps"
    require_sound(result.folder)
    return result.folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[int, str]:
    """Digests after each step of a deterministic run over shared memory."""
    return digests(play(tmp_path_factory.mktemp("reference"), "shared"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_deterministic_run_is_the_same_to_the_bit_over_every_transport(tmp_path, reference, transport):
    folder = play(tmp_path, transport)
    assert digests(folder) == reference
    assert len(set(reference.values())) == len(reference), "nothing was learned, so nothing was compared"
    with LedgerReader(folder / "ledger") as reader:
        published = [entry.event for entry in reader.events(Published)]
    assert len(published) == len(reference) + 1
    assert all(each.moved_bytes > 0 for each in published)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fleet_of_two_goes_on_while_one_is_killed_and_restored(tmp_path, transport):
    started: dict[str, list[EmbeddedEngine]] = {}
    steps, is_back, is_ended = 0, False, False

    async def launch(spec: EmbeddedSpec) -> Engine:
        engine = await EmbeddedEngine.launch(spec)
        started.setdefault(spec.engine, []).append(engine)
        return engine

    def kill_one_and_end_when_it_took_part_again(event: Event) -> None:
        nonlocal steps, is_back, is_ended
        steps += isinstance(event, StepTaken)
        if isinstance(event, StepTaken) and steps == 3:
            os.kill(started["engine-1"][0].process.pid, signal.SIGKILL)
        is_back |= isinstance(event, EngineRestored)
        if isinstance(event, Published) and is_back and len(event.committed) == 2 and not is_ended:
            is_ended = True
            os.kill(os.getpid(), signal.SIGTERM)

    options = "engine.count=2", "staleness.max_staleness=2", "trainer.steps=5000", f"sync.transport={transport}"
    observer = kill_one_and_end_when_it_took_part_again
    result = Run(small_config(tmp_path, EMBEDDED, *options)).start([observer], launcher=launch)
    assert (result.reason, result.exit_code) == ("stopped", 143)
    require_sound(result.folder)
    with LedgerReader(result.folder / "ledger") as reader:
        (back,) = reader.events(EngineRestored)
        before = [entry.event.engine for entry in reader.events(EngineFenced) if entry.seq < back.seq]
        assert {back.event.engine, *before} == {"engine-1"}
        both = [entry.event for entry in reader.events(Published) if len(entry.event.committed) == 2]
    assert both[0].version.number == 0
    assert both[-1].version.number > 3, "the restored engine took part in no later publication"
    assert all(each.moved_bytes > 0 for each in both)
