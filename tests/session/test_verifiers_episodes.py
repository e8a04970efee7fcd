"""A taskset of the real verifiers, in whole episodes over a real session: scored by it, ungraded when it fails."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from served import serving

from fathom.config.agent import LimitsConfig
from fathom.core.errors import ConfigError, DataError
from fathom.core.ports.agent import Acting, Played, Transcript
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.envs.registry import build_environment
from fathom.envs.verifiers import VerifiersEnvironment, VerifiersOptions

PYTHON = os.environ.get("FATHOM_TEST_VERIFIERS", "")
NEEDS = pytest.mark.skipif(not PYTHON, reason="FATHOM_TEST_VERIFIERS names no interpreter with verifiers 0.4.0")
MARK = f"verifiers-episodes-{os.getpid()}"
OPTIONS = {
    "python": PYTHON,
    "taskset": "reversing_words",
    "eval_size": 1,
    "variables": {"PYTHONPATH": str(Path(__file__).parent), "MARK": MARK},
}


def play(
    environment: VerifiersEnvironment, *says: str, agent_s: float = 100.0, gated: bool = False
) -> tuple[Played, list[str]]:
    """Play the first training task; also what the model was sent."""
    told: list[str] = []

    async def run(endpoint, tell) -> Played:
        players = AgentProcesses(environment, LimitsConfig(boot_s=200.0, agent_s=agent_s))
        await players.start()
        try:
            return await players.play(environment.tasks()[0], endpoint, tell)
        finally:
            await players.close()

    with serving(*says, gated=gated) as served:
        key = served.open()
        endpoint = served.call(served.server.endpoint, key)

        async def tell(acting: Acting, detail: str) -> Transcript:
            closed = await asyncio.to_thread(served.close, key)
            told.extend(message.content for message in closed.messages)
            return Transcript(
                messages=closed.messages, finish_reasons=closed.finish_reasons, acting=acting, detail=detail
            )

        return asyncio.run(run(endpoint, tell)), told


@NEEDS
@pytest.mark.timeout(300)
def test_the_taskset_scores_what_the_model_says():
    environment = build_environment("verifiers", OPTIONS)
    assert isinstance(environment, VerifiersEnvironment)
    assert [task.id for task in environment.eval_tasks()] == ["eval/0"]
    assert [task.id for task in environment.tasks()] == ["train/1", "train/2"]
    played, told = play(environment, '~letters_spell~{"word": "cde"}^$', "edc$")
    assert isinstance(played.reward, Graded), played
    assert played.reward.components == {"reversed_right": 1.0, "brief": 0.5}
    assert (played.acting, played.fault) == (Acting.ENDED, "")
    assert told == ["Reverse cde.", "", "c d e", "edc"]


@NEEDS
@pytest.mark.timeout(300)
def test_a_reward_that_raises_is_no_reward_of_0():
    played, _ = play(VerifiersEnvironment(VerifiersOptions.model_validate(OPTIONS)), "boom$")
    assert isinstance(played.reward, Ungraded)
    assert played.reward.cause == "verifiers_task_error"
    assert "the grader fell over" in played.reward.detail


@NEEDS
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("agent", "limit"), [({"max_turns": 1}, "max_turns"), ({"timeout": {"rollout": 10.0}}, "agent_timeout")]
)
def test_a_limit_of_verifiers_cuts_it_short_and_it_is_scored(agent, limit):
    environment = VerifiersEnvironment(VerifiersOptions.model_validate(OPTIONS | {"agent": agent}))
    calls = '~letters_spell~{"word": "cde"}^$'
    played, _ = play(environment, calls, "edc$", gated=limit == "agent_timeout")
    assert (played.acting, played.detail) == (Acting.TIMEOUT, f"verifiers stopped it: {limit}")
    assert isinstance(played.reward, Graded), played
    assert played.reward.components == {"reversed_right": 0.0, "brief": 0.5}


@NEEDS
@pytest.mark.timeout(300)
def test_what_is_not_over_in_time_has_no_reward_and_leaves_no_process():
    played, _ = play(VerifiersEnvironment(VerifiersOptions.model_validate(OPTIONS)), "edc$", agent_s=0.2)
    assert isinstance(played.reward, Ungraded)
    assert (played.reward.cause, played.acting) == ("verifiers_unfinished", Acting.TIMEOUT)
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if is_ours(path)]


@NEEDS
@pytest.mark.timeout(300)
def test_what_verifiers_refuses_is_refused_when_a_run_starts():
    with pytest.raises(ConfigError, match="no_such_taskset"):
        build_environment("verifiers", OPTIONS | {"taskset": "no_such_taskset"})
    with pytest.raises(DataError, match="has 3 tasks"):
        build_environment("verifiers", OPTIONS | {"eval_size": 3})


def test_an_environment_without_verifiers_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be started.*pip install verifiers==0\.4\.0 uv"):
        build_environment("verifiers", OPTIONS | {"python": str(tmp_path / "python")})
    with pytest.raises(ConfigError, match="agent: runtime is set from elsewhere"):
        build_environment("verifiers", OPTIONS | {"python": "x", "agent": {"runtime": {"type": "prime"}}})


def is_ours(path: Path) -> bool:
    try:
        return f"MARK={MARK}".encode() in path.read_bytes()
    except OSError:
        return False
