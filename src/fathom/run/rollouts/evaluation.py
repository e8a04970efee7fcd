"""Evaluation: held-out tasks at one pinned version, with its own sampling and its own numbers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import final

import numpy as np

from fathom.config.run import EvalConfig
from fathom.core.errors import RunStoppedError
from fathom.core.ids import GroupId, Occurrence, PolicyVersion
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus
from fathom.ledger.events import Evaluated
from fathom.rollout.episode import EpisodePlan
from fathom.run.rollouts.seeds import request_seed
from fathom.run.stop import Stop

PASSING_REWARD = 1.0
"""A sample passes when its reward is at least this."""
_ATTEMPTS = 3
"""Attempts at a sample before it is ungraded."""
_EVALUATION_STREAM = 1 << 32
"""Keeps evaluation seeds apart from those of rollouts."""


@final
class Evaluator:
    """Evaluates one version on fixed tasks with fixed seeds, so that two evaluations are paired by task."""

    def __init__(
        self,
        config: EvalConfig,
        play: Callable[[EpisodePlan], Awaitable[Trajectory]],
        tasks: Sequence[tuple[Task, np.ndarray]],
        *,
        max_new_tokens: int,
        concurrency: int,
        seed: int,
        stop: Stop,
        recover: Callable[[], Awaitable[object]],
    ) -> None:
        """`play` plays an episode. `recover` looks after the engines once; a sample that one of them failed is taken
        again afterwards."""
        self._config = config
        self._play = play
        self._tasks = tasks
        self._max_new_tokens = max_new_tokens
        self._slots = asyncio.Semaphore(concurrency)
        self._seed = seed
        self._stop = stop
        self._recover = recover

    async def evaluate(self, version: PolicyVersion) -> Evaluated | None:
        """Sample every task `samples` times by exactly `version`; an update of the weights does not disturb it.

        None: the run was asked to end meanwhile.
        """
        started = time.monotonic()
        samples = self._config.samples
        ended: list[Trajectory] = []
        with suppress(RunStoppedError):
            async with self._stop.cancels():
                ended = await self._all(version)
        if not ended:
            return None
        by_task = [ended[start : start + samples] for start in range(0, len(ended), samples)]
        return self._summary(version, by_task, time.monotonic() - started)

    async def _all(self, version: PolicyVersion) -> list[Trajectory]:
        """All samples, task by task. When one raises, the others are ended."""
        try:
            async with asyncio.TaskGroup() as group:
                playing = [
                    group.create_task(self._episode(version, place, sample))
                    for place in range(len(self._tasks))
                    for sample in range(self._config.samples)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others ended because of it, or as it did
        return [task.result() for task in playing]

    async def _episode(self, version: PolicyVersion, place: int, sample: int) -> Trajectory:
        """One sample; after an infrastructure failure another attempt with the same seed, so that it stays paired."""
        async with self._slots:
            ended = await self._play(self._plan(version, place, sample, 0))
        for attempt in range(1, _ATTEMPTS):
            if ended.header.status is not TrajectoryStatus.FAILED:
                break
            await self._recover()
            async with self._slots:
                ended = await self._play(self._plan(version, place, sample, attempt))
        return ended

    def _plan(self, version: PolicyVersion, place: int, sample: int, attempt: int) -> EpisodePlan:
        task, prompt_ids = self._tasks[place]
        return EpisodePlan(
            group=GroupId(f"eval/{version.name}/{place}/a{attempt}"),
            member=sample,
            occurrence=Occurrence(epoch=0, index=place),
            attempt=attempt,
            task=task,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=self._config.temperature),
            max_new_tokens=self._max_new_tokens,
            seed=request_seed(self._seed, _EVALUATION_STREAM + place, sample, 0),
            priority=place,
            purpose=Purpose.EVALUATION,
            pinned=version,
            barrier=None,
        )

    def _summary(self, version: PolicyVersion, by_task: list[list[Trajectory]], seconds: float) -> Evaluated:
        rewards = [[t.header.reward.total for t in task if isinstance(t.header.reward, Graded)] for task in by_task]
        graded = [task for task in rewards if len(task) >= self._config.pass_at]
        passes = [pass_at_k([reward >= PASSING_REWARD for reward in task], self._config.pass_at) for task in graded]
        low, high = wilson_interval(sum(passes), len(passes))
        flat = [reward for task in rewards for reward in task]
        return Evaluated(
            version=version,
            tasks=len(by_task),
            samples=self._config.samples,
            pass_at=self._config.pass_at,
            pass_rate=sum(passes) / len(passes) if passes else math.nan,
            low=low,
            high=high,
            reward_mean=sum(flat) / len(flat) if flat else math.nan,
            ungraded=sum(len(task) for task in by_task) - len(flat),
            per_task=tuple(sum(task) / len(task) if task else math.nan for task in rewards),
            seconds=seconds,
            tokens_per_task=tuple(_mean_tokens(task) for task in by_task),
        )


def _mean_tokens(task: Sequence[Trajectory]) -> float:
    counts = [ended.payload.num_sampled for ended in task if isinstance(ended.header.reward, Graded)]
    return sum(counts) / len(counts) if counts else math.nan


def pass_at_k(passed: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes, from n >= k samples (arXiv 2107.03374)."""
    n, failures = len(passed), len(passed) - sum(passed)
    return 1.0 - math.comb(failures, k) / math.comb(n, k)


def wilson_interval(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % Wilson score interval of a rate; conservative where successes are fractional (pass@k of several samples)."""
    if n == 0:
        return math.nan, math.nan
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
