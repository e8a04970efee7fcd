"""Latencies drawn from a seed: reproducible, log-normal, and gone when the median is 0."""

from __future__ import annotations

import math
import pickle
import statistics

import pytest

from fathom.bench.rig.slow_environment import SlowEnvironment
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions

SUMS = Arithmetic(ArithmeticOptions(num_train=50, num_eval=0))


def slow(median_s: float = 2.0, sigma: float = 1.0, seed: int = 0) -> SlowEnvironment:
    return SlowEnvironment(SUMS, median_s=median_s, sigma=sigma, seed=seed)


def latencies(environment: SlowEnvironment) -> list[float]:
    return [environment.latency_s(task, str(answer)) for task in environment.tasks() for answer in range(40)]


def test_latency_is_log_normal() -> None:
    logs = [math.log(latency) for latency in latencies(slow())]
    assert statistics.mean(logs) == pytest.approx(math.log(2.0), abs=0.1)
    assert statistics.stdev(logs) == pytest.approx(1.0, abs=0.05)


def test_latency_depends_on_seed_task_and_answer_alone() -> None:
    first, second = SUMS.tasks()[:2]
    here, elsewhere = slow(), pickle.loads(pickle.dumps(slow()))
    assert here.latency_s(first, "1") == elsewhere.latency_s(first, "1")
    others = (here.latency_s(first, "2"), here.latency_s(second, "1"), slow(seed=1).latency_s(first, "1"))
    assert here.latency_s(first, "1") not in others


def test_without_a_median_nothing_waits_and_rewards_stay() -> None:
    task = SUMS.tasks()[0]
    assert set(latencies(slow(median_s=0.0))) == {0.0}
    rewards = [slow(median_s=0.0).grade(task, str(answer)).total for answer in range(40)]
    assert set(rewards) == {0.0, 1.0}
    assert rewards == [slow(median_s=0.0).grade(task, str(answer)).total for answer in range(40)]
