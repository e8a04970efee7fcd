"""The clock's rules, by hand and beside an exhaustive look ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.buffer.clock import Clock
from fathom.config.trainer import StalenessConfig
from fathom.core.errors import BooksError


def clock(*, groups: int = 2, steps: int = 1, every: int = 1, bound: int = 2, kv: int | None = None) -> Clock:
    staleness = StalenessConfig(max_staleness=bound, max_kv_staleness=kv, publish_every=every)
    return Clock(groups_per_step=groups, steps_on_a_batch=steps, staleness=staleness)


def admitted(of: Clock) -> int:
    """How many groups may be outstanding at once."""
    return next(n for n in range(1000) if not of.may_start(n))


@pytest.mark.parametrize(
    ("groups", "steps", "every", "bound", "expected"),
    [(4, 1, 1, 0, 4), (4, 1, 1, 1, 8), (4, 1, 1, 4, 20), (4, 2, 1, 1, 4), (4, 2, 1, 2, 4), (4, 2, 1, 3, 8)],
)
def test_admission_at_rest(groups: int, steps: int, every: int, bound: int, expected: int) -> None:
    assert admitted(clock(groups=groups, steps=steps, every=every, bound=bound)) == expected


def test_slots_are_released_by_the_publication_and_not_by_the_step() -> None:
    synchronous = clock(groups=4, bound=0)
    synchronous.begin_batch()
    assert admitted(synchronous) == 0
    synchronous.step()
    synchronous.end_batch()
    assert (admitted(synchronous), synchronous.publication_due) == (0, True)
    synchronous.publish(1)
    assert (admitted(synchronous), synchronous.publication_due) == (4, False)


def test_a_step_without_effect_leaves_time_where_it_was() -> None:
    still = clock(groups=4, bound=0)
    still.begin_batch()
    still.end_batch()
    assert (still.version, admitted(still), still.publication_due) == (0, 4, False)


def test_the_tighter_bound_decides() -> None:
    assert clock(bound=4, kv=1).deadline(10, 8) == 9
    assert clock(bound=1, kv=4).deadline(10, 8) == 11
    assert admitted(clock(bound=4, kv=1)) == admitted(clock(bound=1))


def test_versions_never_go_back_nor_ahead() -> None:
    moving = clock()
    with pytest.raises(BooksError, match="belongs to no batch"):
        moving.step()
    with pytest.raises(BooksError, match="version 1 cannot be published"):
        moving.publish(1)
    moving.begin_batch()
    with pytest.raises(BooksError, match="in training already"):
        moving.begin_batch()
    moving.step()
    with pytest.raises(BooksError, match="belongs to no batch"):
        moving.step()
    moving.publish(1)
    with pytest.raises(BooksError, match="version 0 cannot be published"):
        moving.publish(0)


@given(
    groups=st.integers(1, 3),
    steps=st.integers(1, 3),
    ages=st.lists(st.integers(0, 6), max_size=7),
)
def test_a_batch_may_be_taken_iff_the_rest_could_still_be_trained_in_time(
    groups: int, steps: int, ages: list[int]
) -> None:
    """Beside playing the rest of the training: oldest first, batch by batch, as soon as possible."""
    now = clock(groups=groups, steps=steps, bound=6)
    deadlines = [now.deadline(-age, -age) for age in ages]
    version, rest, in_time = steps, sorted(deadlines), True
    while rest:
        batch, rest = rest[:groups], rest[groups:]
        for _ in range(steps):
            in_time &= all(version <= due for due in batch)
            version += 1
    assert now.may_take(deadlines) is in_time
