"""The process that knows verifiers, with a stand-in for it: loaded once, a player for each episode, nothing left."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from fathom.config.agent import LimitsConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.agent import Endpoint, Transcript
from fathom.core.records.trajectory import Graded
from fathom.envs.agents import AgentProcesses
from fathom.envs.verifiers import VerifiersEnvironment, VerifiersOptions

STAND_IN = Path(__file__).parent / "verifiers_stand_in"
NOWHERE = Endpoint(base_url="http://127.0.0.1:9", key="none", model="none")


def options(folder, *deeds, **changes) -> VerifiersOptions:
    given = {
        "python": sys.executable,
        "taskset": "deeds",
        "taskset_options": {"deeds": list(deeds)},
        "variables": {"PYTHONPATH": str(STAND_IN), "NOTES": str(folder / "notes")},
    }
    return VerifiersOptions.model_validate(given | changes)


def notes(folder, word) -> list[str]:
    return [line for line in (folder / "notes").read_text().splitlines() if line.startswith(word)]


def strays(folder) -> list[int]:
    """Those that are still there."""
    return [number for note in notes(folder, "stray") if runs(number := int(note.split()[1]))]


def runs(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # ended; its new parent may not have looked yet


def play(folder, *deeds, agent_s=60.0, times=1):
    """All deeds at once, `times` times; also what was left when the last had ended."""
    environment = VerifiersEnvironment(options(folder, *deeds))

    async def tell(acting, detail):
        return Transcript(messages=(), finish_reasons=(), acting=acting, detail=detail)

    async def run():
        async with AgentProcesses(environment, LimitsConfig(boot_s=100.0, agent_s=agent_s, grace_s=10.0)) as players:
            rounds = []
            for _ in range(times):
                episodes = [players.play(task, NOWHERE, tell) for task in environment.tasks()]
                rounds += await asyncio.gather(*episodes)
            return rounds, strays(folder) if (folder / "notes").exists() else []

    return asyncio.run(run())


def test_episodes_at_the_same_time_share_what_was_loaded_once(tmp_path):
    played, _ = play(tmp_path, "one", "two", "errs", times=2)
    first, second, failed = played[:3]
    assert isinstance(first.reward, Graded), first
    assert first.reward.components == {"right": 0.5}
    assert isinstance(second.reward, Graded), second
    assert failed.reward.cause == "verifiers_task_error"
    assert [each.reward for each in played[3:]] == [each.reward for each in played[:3]]
    assert len(notes(tmp_path, "loaded")) == 2, "once to list the tasks, once to play them"


def test_a_player_that_dies_is_its_own_episodes_loss_and_leaves_nothing(tmp_path):
    (died, other), left = play(tmp_path, "dies", "one")
    assert died.reward.cause == "verifiers_unfinished"
    assert "out of ideas" in died.reward.detail
    assert isinstance(other.reward, Graded), other
    assert (len(notes(tmp_path, "stray")), left) == (1, [])


def test_what_a_taskset_has_started_serves_all_episodes(tmp_path):
    played, _ = play(tmp_path, "dies", "needs the helper", times=2)
    assert [isinstance(each.reward, Graded) for each in played] == [False, True, False, True], played


def test_a_player_that_blocks_is_killed_with_all_it_started(tmp_path):
    (blocked,), left = play(tmp_path, "blocks", agent_s=2.0)
    assert blocked.reward.cause == "verifiers_unfinished"
    assert (len(notes(tmp_path, "stray")), left) == (1, [])


def test_a_player_is_asked_to_take_down_what_it_started(tmp_path):
    (late,), _ = play(tmp_path, "tidies up", agent_s=2.0)
    assert late.reward.cause == "verifiers_unfinished"
    assert notes(tmp_path, "tidied up")


def test_another_is_started_when_the_process_that_forks_has_died(tmp_path):
    played, _ = play(tmp_path, "ends the process that it was forked from", times=2)
    assert [each.reward.cause for each in played] == ["verifiers_unfinished"] * 2
    assert len(notes(tmp_path, "loaded")) == 3, "listed, loaded, and loaded again"


def test_a_taskset_that_is_not_listed_in_time_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"not listed within 3 s; raise task\.options\.load_timeout_s"):
        VerifiersEnvironment(options(tmp_path, "is never listed", load_timeout_s=3.0))
    assert len(notes(tmp_path, "stray")) == 1
    ends_s = time.monotonic() + 20.0
    while strays(tmp_path) and time.monotonic() < ends_s:  # it was sent a signal
        time.sleep(0.01)
    assert not strays(tmp_path)
