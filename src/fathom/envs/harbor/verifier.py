"""Runs a task's tests and reads the reward they leave. Whatever is not a clear reward is an error, never 0."""

from __future__ import annotations

import json
import math
from typing import Any

from fathom.core.records.trajectory import Graded
from fathom.envs.harbor.folder import LOGS, SOLUTION, TESTS, HarborTask
from fathom.envs.harbor.places import Place
from fathom.envs.sandbox import Ended

GRADER = "harbor/1"
_REWARDS = f"{LOGS}/verifier"


class VerifierError(Exception):
    """The tests gave no reward: they failed themselves, or left nothing that is one."""


async def verify(task: HarborTask, place: Place) -> Graded:
    """Run the tests in the world the agent left.

    Raises:
        VerifierError: no reward. SandboxError: the sandbox is gone.
    """
    table = task.file.verifier
    await place.begin_tests()
    for folder in (SOLUTION, TESTS, LOGS, _REWARDS):
        await place.empty(folder)
    await place.put(task.tests())
    ran = await place.run(f"bash {TESTS}/test.sh", table.timeout_sec)
    if ran.ended not in (Ended.EXITED, Ended.SHELL_ENDED):
        raise VerifierError(f"the tests of {task.id} were ended by a limit ({ran.ended}): {ran.stderr[-500:]}")
    as_json = await place.get(f"{_REWARDS}/reward.json")
    if as_json is not None:
        return Graded(components=json_reward(as_json), grader=GRADER, answer_found=True)
    as_text = await place.get(f"{_REWARDS}/reward.txt")
    if as_text is None:
        raise VerifierError(
            f"the tests of {task.id} left no reward (exit code {ran.exit_code}): {(ran.stderr or ran.stdout)[-500:]}"
        )
    return Graded(components={"reward": text_reward(as_text)}, grader=GRADER, answer_found=True)


def json_reward(content: bytes) -> dict[str, float]:
    """The components in `reward.json`: its `reward` alone if it has one, else all of its numbers.

    Raises:
        VerifierError: no object of finite numbers, or an empty one.
    """
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"reward.json is no JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise VerifierError(f"reward.json is {str(found)[:100]!r}, not an object of numbers")
    rewards: dict[str, float] = {}
    for name, value in found.items():  # pyright: ignore[reportUnknownVariableType]  # JSON: judged right here
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise VerifierError(f"reward.json: {name!r} is {str(value)[:100]!r}, not a number")
        rewards[str(name)] = _finite(float(value) if abs(value) < 1e300 else math.inf)
    return {"reward": rewards["reward"]} if "reward" in rewards else rewards


def text_reward(content: bytes) -> float:
    """The number in `reward.txt`.

    Raises:
        VerifierError: empty, no number, or not a finite one.
    """
    text = content.decode(errors="replace").strip()
    try:
        return _finite(float(text))
    except ValueError as error:
        raise VerifierError(f"reward.txt holds {text[:100]!r}, not a number") from error


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise VerifierError(f"the reward is {value}, not a finite number")
    return value
