"""Seeds and pass rates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.run.rollouts.evaluation import pass_at_k, wilson_interval
from fathom.run.rollouts.seeds import request_seed


def test_seeds_depend_on_each_part_and_on_nothing_else() -> None:
    parts = list(itertools.product((0, 1, 11), (0, 1, 1 << 32), (0, 1), (0, 1)))
    seeds = [request_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert seeds == [request_seed(*part) for part in parts]
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    assert pass_at_k(passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_of_known_counts() -> None:
    low, high = wilson_interval(8, 10)  # 0.4901625, 0.9433178 by the closed form
    assert (low, high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    assert all(math.isnan(end) for end in wilson_interval(0, 0))


@given(st.integers(1, 1000), st.data())
def test_wilson_interval_holds_the_rate_within_zero_and_one(n: int, data: st.DataObject) -> None:
    passes = data.draw(st.integers(0, n))
    low, high = wilson_interval(passes, n)
    assert 0 <= low <= passes / n + 1e-12
    assert passes / n - 1e-12 <= high <= 1
