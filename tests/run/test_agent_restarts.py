"""Agents' runs whose processes are killed in the middle of an episode: the engine's, and the run's own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest
from small_runs import RunProcess, engine_below, incarnations, require_sound
from talks import TEMPLATE

from fathom.config.load import load_config
from fathom.config.run import RunConfig
from fathom.core.ports.agent import Endpoint
from fathom.core.records.trajectory import Trajectory, TrajectoryStatus, Ungraded
from fathom.ledger.events import EngineRestored, FaultSeen, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = """
name = "talks"
[task]
kind = "talks:Talks"
limits = { boot_s = 20, agent_s = 30, grade_s = 20, close_s = 20, grace_s = 1 }
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 24
max_prompt_tokens = 176
[engine]
max_running = 16
health_timeout_s = 60
[trainer]
steps = 3
groups_per_step = 2
[trainer.optimizer]
lr = 1e-3
[checkpoint]
every_steps = 1
[staleness]
min_graded = 2
"""
DEADLINE_S = 20 + 30 + 20 + 20 + 6 * 1
"""From an episode's boot to its end, all limits together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_character_tokenizer(folder)
    described = folder / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"chat_template": TEMPLATE}))
    make_tiny("arithmetic", 0, folder)
    return folder


def config_of(tmp_path: Path, model: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "talks.toml"
    file.write_text(CONFIG)
    return load_config(file, [f'model.path="{model}"', f'runs_dir="{tmp_path / "runs"}"', *overrides])


def trajectories(run: Path) -> list[tuple[float | None, Trajectory]]:
    """Rewards as the index has them, and records; undone ones included."""
    with LedgerReader(run / "ledger") as reader:
        entries = reader.trajectories(include_undone=True)
        return [(entry.reward, reader.trajectory(entry.id).trajectory) for entry in entries]


def newest(folder: Path, count: int, seen: set[Path], within_s: float = 120.0) -> list[Path]:
    """Endpoints that episodes left since, once there are so many."""
    deadline = time.monotonic() + within_s
    while len(found := sorted(set(folder.glob("*.json")) - seen)) < count:
        assert time.monotonic() < deadline, f"{len(found)} endpoints"
        time.sleep(0.02)
    return found


def let_it_end(run: Path, after_steps: int) -> None:
    """Resumed, it takes so many steps more."""
    with LedgerReader(run / "ledger") as reader:
        taken = len(reader.events(StepTaken))
    path = run / "config.json"
    described = json.loads(path.read_text())
    described["trainer"]["steps"] = taken + after_steps
    path.write_text(json.dumps(described))


def ask(endpoint: Endpoint, key: str) -> httpx.Response:
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{endpoint.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60.0)


@pytest.mark.parametrize("patient", [True, False], ids=["agents ask again", "agents give up"])
def test_a_killed_engine_costs_no_group_its_end(tmp_path: Path, model: Path, patient: bool) -> None:
    """`kill -9` of the only engine, with turns on it: it is replaced, and every member ends in time with its cause."""
    left = tmp_path / "endpoints"
    left.mkdir()
    options = f'task.options={{patient={str(patient).lower()}, turns=6, endpoints="{left}"}}'
    process = RunProcess(config_of(tmp_path, model, options))
    newest(left, 4, set())  # they have begun to ask
    run = process.run
    assert run is not None
    assert process.process.pid is not None
    engine = engine_below(process.process.pid)
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    killed_s = time.time()
    assert process.wait(within_s=300.0, gone_s=60.0) == 0
    require_sound(run)
    with LedgerReader(run / "ledger") as reader:
        assert reader.events(EngineRestored)
        assert any("-9" in entry.event.detail for entry in reader.events(FaultSeen))
    records = trajectories(run)
    for reward, record in records:
        ungraded = isinstance(record.header.reward, Ungraded)
        assert (reward is None) == ungraded, "nothing ungraded has a reward, be it 0"
        assert record.header.ended_s - record.header.started_s < DEADLINE_S
        if ungraded:
            assert record.header.status in (TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED)
    hit = [record for _, record in records if record.header.started_s < killed_s < record.header.ended_s]
    assert hit, "sessions were open when the engine died"
    causes = Counter(each.header.reward.cause for each in hit if isinstance(each.header.reward, Ungraded))
    if not patient:
        assert causes["engine_error"] >= 1, causes
    assert set(causes) <= {"engine_error", "aborted", "no_turns"}, causes


def test_a_killed_run_goes_on_and_tells_old_keys_so(tmp_path: Path, model: Path) -> None:
    """`kill -9` of the run alone, in the middle of episodes: nothing that it had started is left."""
    left = tmp_path / "endpoints"
    left.mkdir()
    options = f'task.options={{endpoints="{left}"}}', "rollout.max_in_flight=8", "trainer.steps=100000"
    config = config_of(tmp_path, model, "engine.kind=scripted", *options)
    first = RunProcess(config)
    run = first.wait_for(StepTaken, within_s=180.0)
    newest(left, 1, set(left.glob("*.json")))  # somebody acts
    first.signal(signal.SIGKILL)
    assert first.wait(within_s=60.0, gone_s=60.0) == -signal.SIGKILL
    let_it_end(run, after_steps=8)
    seen = set(left.glob("*.json"))
    old = msgspec.json.decode(max(seen).read_bytes(), type=Endpoint)

    second = RunProcess(config, run)
    now = msgspec.json.decode(newest(left, 1, seen)[0].read_bytes(), type=Endpoint)
    refused, unknown = ask(now, old.key), ask(now, "sk-mine")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (410, "false")
    assert refused.json()["error"]["code"] == "session_ended"
    assert "incarnation 1 of the run, which has ended" in refused.json()["error"]["message"]
    assert unknown.status_code == 401
    assert second.wait(within_s=300.0, gone_s=60.0) == 0
    assert incarnations(run) == 2
    require_sound(run)
    assert all((reward is None) == isinstance(each.header.reward, Ungraded) for reward, each in trajectories(run))
