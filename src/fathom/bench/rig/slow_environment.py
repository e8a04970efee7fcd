"""An environment whose answers take their time: what tools, sandboxes and people do to a rollout, as a seeded sleep."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import NormalDist
from typing import final

from blake3 import blake3

from fathom.core.ports.environment import Environment, Task
from fathom.core.records.trajectory import Graded

_NORMAL = NormalDist()


@final
class SlowEnvironment:
    """The tasks of another environment; grading an answer sleeps for a log-normal time, without using the CPU.

    The time depends on the seed, the task and the answer alone, so runs that sample the same answers wait the same
    times, whatever their order. The reward is a coin thrown in the same way: groups have a spread to learn from even
    where no answer is right.
    """

    def __init__(self, inner: Environment, *, median_s: float, sigma: float, seed: int) -> None:
        self._inner = inner
        self._median_s = median_s
        self._sigma = sigma
        self._seed = seed

    def tasks(self) -> Sequence[Task]:
        """Training tasks of the inner environment."""
        return self._inner.tasks()

    def eval_tasks(self) -> Sequence[Task]:
        """None."""
        return ()

    def grade(self, task: Task, answer: str) -> Graded:
        """Sleep, then throw the coin."""
        time.sleep(self.latency_s(task, answer))
        return Graded(
            components={"coin": float(self._uniform("coin", task, answer) < 0.5)}, grader="coin/1", answer_found=True
        )

    def latency_s(self, task: Task, answer: str) -> float:
        """Seconds this answer takes: median * exp(sigma * z), z standard normal. 0 where the median is."""
        return self._median_s * math.exp(self._sigma * _NORMAL.inv_cdf(self._uniform("latency", task, answer)))

    def _uniform(self, what: str, task: Task, answer: str) -> float:
        """In (0, 1), from a hash."""
        number = int.from_bytes(blake3(f"{what}/{self._seed}/{task.id}/{answer}".encode()).digest()[:6], "big")
        return (number + 0.5) / (1 << 48)
