"""A loop with random durations around the buffer: it always ends, and never by standing still."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from buffer_world import Setting, World
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.buffer.facts import Drained, Taken
from fathom.buffer.group_buffer import FRUITLESS_BATCHES
from fathom.config.families import OnStale
from fathom.core.errors import NoProgressError
from fathom.core.records.states import Fate

CLOCKS = st.builds(
    Setting,
    groups_per_step=st.integers(1, 4),
    steps_on_a_batch=st.integers(1, 3),
    publish_every=st.integers(1, 4),
    slack=st.sampled_from([0, 1, 4]),
    kv_slack=st.sampled_from([None, 0, 1]),
    group_size=st.integers(1, 2),
    num_tasks=st.integers(1, 30),
)


class Loop:
    """Source, rollouts, trainer and publisher as events in time. Everything that may happen happens at once."""

    def __init__(self, setting: Setting, random: Random, *, max_in_flight: int, bad: float = 0.0) -> None:
        self.world = World(setting)
        self.random = random
        self.max_in_flight = max(max_in_flight, setting.group_size)
        self.bad = bad
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now, self.count = 0.0, 0
        self.publishing = self.drained = False

    def run(self, batches: int) -> int:
        """Until this many batches are trained or the data are drained; returns the batches trained."""
        trained = 0
        while not self.drained and trained < batches:
            self.admit()
            result = None if self.world.batch else self.world.take()
            if isinstance(result, Taken):
                trained += 1
                self.after(self.random.expovariate(1.0), self.step)
            self.drained = isinstance(result, Drained)
            if self.world.buffer.clock.publication_due and not self.publishing:
                self.publishing = True
                self.after(self.random.choice([0.0, 0.5, 3.0]), self.publish)
            # facts of a take may have freed slots, so only a second look without any event is a standstill
            if not self.events and not self.drained and not self.can_admit():
                raise AssertionError(f"deadlock after {trained} batches: {result}")
            if self.events:
                self.now, _, event = heapq.heappop(self.events)
                event()
        return trained

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, event))

    def can_admit(self) -> bool:
        buffer = self.world.buffer
        room = buffer.running_trajectories + self.world.setting.group_size <= self.max_in_flight
        return room and buffer.may_start() and not buffer.source.exhausted

    def admit(self) -> None:
        while self.can_admit():
            for member in self.world.start():
                seconds = self.random.lognormvariate(0.0, 1.5)
                self.after(seconds, lambda member=member: self.world.end(member, self.random, bad=self.bad))

    def step(self) -> None:
        self.world.step(self.random, idle=0.0)
        if self.world.mini_batches:
            self.after(self.random.expovariate(1.0), self.step)
        else:
            self.world.settle()

    def publish(self) -> None:
        self.publishing = False
        self.world.publish()


@settings(max_examples=100, deadline=None)
@given(setting=CLOCKS, seed=st.integers(0, 2**32), max_in_flight=st.integers(1, 40))
def test_wait_trains_every_batch_and_drops_nothing_for_age(setting: Setting, seed: int, max_in_flight: int) -> None:
    loop = Loop(setting, Random(seed), max_in_flight=max_in_flight)
    assert loop.run(8) == 8
    assert not loop.world.fates()[Fate.AGE]


@settings(max_examples=100, deadline=None)
@given(
    setting=CLOCKS,
    on_stale=st.sampled_from(list(OnStale)),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    bad=st.sampled_from([0.0, 0.3]),
)
def test_finite_data_end_with_every_occurrence_decided_once(
    setting: Setting, on_stale: OnStale, epochs: int, seed: int, bad: float
) -> None:
    setting = replace(setting, on_stale=on_stale, epochs=epochs)
    loop = Loop(setting, Random(seed), max_in_flight=16, bad=bad)
    loop.run(10_000)
    assert loop.drained
    decided = loop.world.heard.occurrences
    assert len(decided) == setting.num_tasks * epochs
    assert None not in decided.values()
    state = loop.world.buffer.books.snapshot()
    assert not state.live
    assert state.trained + sum(state.given_up.values()) == len(decided)


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("on_stale", list(OnStale))
def test_every_age_limit_makes_progress(limit: int, on_stale: OnStale) -> None:
    loop = Loop(Setting(slack=limit, on_stale=on_stale, groups_per_step=3), Random(5), max_in_flight=64)
    assert loop.run(30) == 30
    assert max(loop.world.heard.ages) <= limit
    if limit:
        assert max(loop.world.heard.ages) > 0, "rollout never ran ahead of the trainer"


def test_overlap_is_real_only_above_zero() -> None:
    """At 0 nothing runs while a batch trains and every token has the trainer's version: the synchronous run."""

    class Watch(Loop):
        seen = 0

        def step(self) -> None:
            self.seen = max(self.seen, self.world.buffer.running_groups)
            super().step()

    synchronous, overlapped = (Watch(Setting(slack=s), Random(1), max_in_flight=64) for s in (0, 2))
    synchronous.run(20)
    overlapped.run(20)
    assert (synchronous.seen, set(synchronous.world.heard.ages)) == (0, {0})
    assert overlapped.seen > 0


def test_filters_that_never_fill_a_batch_end_with_counts() -> None:
    setting = Setting(filter_zero_variance=True, group_size=1, groups_per_step=2)
    loop = Loop(setting, Random(0), max_in_flight=8)
    tries = FRUITLESS_BATCHES * setting.groups_per_step
    with pytest.raises(NoProgressError, match=f"{tries} groups in a row.*limit is {tries}.*{tries} variance"):
        loop.run(1)
    assert loop.world.buffer.books.snapshot().given_up == {Fate.VARIANCE: tries}


def test_steps_that_never_change_the_weights_end_too() -> None:
    world, random = World(Setting(groups_per_step=1, group_size=1, slack=0)), Random(0)

    def train_in_vain(batches: int) -> None:
        while batches:
            (member,) = world.start()
            world.end(member, random, bad=0.0)
            if isinstance(world.take(), Taken):
                batches -= 1
                world.step(random, idle=1.0)
                world.settle()

    with pytest.raises(NoProgressError, match="no_step"):
        train_in_vain(FRUITLESS_BATCHES + 1)
