"""Worlds with Gymnasium's API, played in whole episodes over a real session."""

from __future__ import annotations

import asyncio

import pytest
from guessing_world import GuessingWorld, secret_of
from pydantic import ValidationError
from served import serving

from fathom.config.agent import LimitsConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.agent import Acting, Played, Transcript
from fathom.core.records.message import Role
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.envs.gymnasium import GymnasiumOptions
from fathom.envs.registry import build_environment

GUESSING = {"env": "guessing_world:GuessingWorld", "instruction": "Only the number.", "size": 5, "eval_size": 3}
RIGHT = str(secret_of(3))
WRONG = str((secret_of(3) + 1) % 10)


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def play(loop):
    """Plays the first training instance of an environment; the model says what is given."""
    started: dict[str, AgentProcesses] = {}

    def playing(options: dict[str, object], *says: str) -> tuple[Played, Transcript | None]:
        environment = build_environment("gymnasium", options)
        processes = started.get(str(options))
        if processes is None:
            processes = started[str(options)] = AgentProcesses(environment, LimitsConfig())
            loop.run_until_complete(processes.start())
        told: list[Transcript] = []
        with serving(*(f"{said}$" for said in says)) as served:
            key = served.open()
            endpoint = served.call(served.server.endpoint, key)

            async def tell(acting: Acting, detail: str) -> Transcript:
                closed = await asyncio.to_thread(served.close, key)
                reasons, messages = closed.finish_reasons, closed.messages
                told.append(Transcript(messages=messages, finish_reasons=reasons, acting=acting, detail=detail))
                return told[0]

            played = loop.run_until_complete(processes.play(environment.tasks()[0], endpoint, tell))
        return played, told[0] if told else None

    yield playing
    for processes in started.values():
        loop.run_until_complete(processes.close())


def test_observations_become_messages_and_rewards_are_added_up(play):
    played, transcript = play(GUESSING, WRONG, RIGHT)
    assert isinstance(played.reward, Graded)
    assert played.reward.components == {"return": 0.75}
    assert played.reward.answer_found
    assert (played.acting, played.detail) == (Acting.ENDED, "")
    asked = [message.content for message in transcript.messages if message.role is Role.USER]
    assert asked == ["Only the number.\n\nGuess a number from 0 to 9.", f"{WRONG} is wrong"]


@pytest.mark.parametrize(
    ("options", "says", "worth", "acting", "detail"),
    [
        ({}, [WRONG] * 3, -0.75, Acting.TIMEOUT, "the world cut it after 3 steps"),
        ({}, [WRONG, WRONG, RIGHT], 0.5, Acting.ENDED, ""),
        ({"max_turns": 2}, [WRONG] * 2, -0.5, Acting.TIMEOUT, "all 2 answers (max_turns) are used up"),
    ],
)
def test_a_limit_is_told_apart_from_the_end(play, options, says, worth, acting, detail):
    played, _ = play(GUESSING | options, *says)
    assert isinstance(played.reward, Graded)
    assert (played.reward.total, played.acting, played.detail) == (worth, acting, detail)


@pytest.mark.parametrize(("said", "fault"), [("break", "RuntimeError: broken"), ("mumble", "TypeError: observation")])
def test_a_fault_of_the_world_gives_no_reward(play, said, fault):
    played, _ = play(GUESSING, WRONG, said)
    assert isinstance(played.reward, Ungraded)
    assert played.reward.cause == "environment_error"
    assert fault in played.reward.detail
    played, transcript = play(GUESSING | {"arguments": {"highest": -1}})
    assert isinstance(played.reward, Ungraded)
    assert (played.reward.cause, transcript) == ("boot_error", None)


def test_a_registered_world_is_played_by_names(play):
    pytest.importorskip("gymnasium", reason="the extra `gymnasium` is not installed")
    lake = {
        "env": "FrozenLake-v1",
        "arguments": {"is_slippery": False},
        "observation": "drawing",
        "action": "name",
        "action_names": ["left", "down", "right", "up"],
        "system": "Find the goal.",
    }
    moves = ["down", "hm", "I go Down", "right", "right", "left? no, down", "right"]
    played, transcript = play(lake, *moves)
    assert isinstance(played.reward, Graded)
    assert (played.reward.total, played.acting) == (1.0, Acting.ENDED)
    asked = [message.content for message in transcript.messages if message.role is Role.USER]
    assert "[S]FFF" in asked[0]
    assert asked[2] == "There is no action in your answer. Answer with one of: left, down, right, up."
    played, _ = play(lake, "down", "right")
    assert (played.reward.total, played.acting) == (0.0, Acting.ENDED)


def test_instances_are_seeds_and_held_out_ones_are_others():
    environment = build_environment("gymnasium", GUESSING)
    assert [task.answer for task in environment.eval_tasks()] == ["0", "1", "2"]
    assert [task.answer for task in environment.tasks()] == ["3", "4", "5", "6", "7"]
    world, again = GuessingWorld(), GuessingWorld()
    assert (world.reset(seed=3), world.secret) == (again.reset(seed=3), again.secret)


def test_what_cannot_be_played_is_refused():
    pytest.importorskip("gymnasium", reason="the extra `gymnasium` is not installed")
    with pytest.raises(ConfigError, match="knows no 'FrozenLake-v9'; did you mean FrozenLake-v1"):
        build_environment("gymnasium", {"env": "FrozenLake-v9"})
    with pytest.raises(ConfigError, match=r"task.options.env 'guessing_world:Guesing': guessing_world has no class"):
        build_environment("gymnasium", {"env": "guessing_world:Guesing"})
    for bad in ({"action": "name"}, {"action_names": ["a"]}, {"action": "name", "action_names": ["a", "A"]}):
        with pytest.raises(ValidationError):
            GymnasiumOptions(env="x", **bad)
