"""Random schedules against a model that only hears the facts. The contracts are asserted in `buffer_world`."""

from __future__ import annotations

from random import Random

from buffer_world import Setting, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fathom.buffer.facts import Drained
from fathom.config.families import OnStale
from fathom.core.records.states import Fate

SETTINGS = st.builds(
    Setting,
    groups_per_step=st.integers(1, 3),
    steps_on_a_batch=st.integers(1, 3),
    publish_every=st.integers(1, 3),
    slack=st.sampled_from([0, 1, 4]),
    kv_slack=st.sampled_from([None, 0, 2]),
    on_stale=st.sampled_from(list(OnStale)),
    group_size=st.integers(1, 3),
    max_attempts=st.integers(1, 3),
    min_graded=st.sampled_from([None, 1]),
    mask_truncated=st.booleans(),
    filter_zero_variance=st.booleans(),
    num_tasks=st.integers(1, 9),
    epochs=st.sampled_from([None, 1, 3]),
)
RANDOM = st.integers(0, 2**32).map(Random)


class Schedule(RuleBasedStateMachine):
    """Anything that a run may do, in any order: starts, ends, batches, steps, publications, checkpoints, crashes."""

    @initialize(setting=SETTINGS)
    def begin(self, setting: Setting) -> None:
        self.world = World(setting)

    @property
    def can_start(self) -> bool:
        return self.world.buffer.may_start() and not self.world.buffer.source.exhausted

    @precondition(lambda self: self.can_start)
    @rule(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for _ in range(count):
            if self.can_start:
                self.world.start()

    @precondition(lambda self: self.world.running)
    @rule(random=RANDOM, count=st.integers(1, 6))
    def end(self, random: Random, count: int) -> None:
        for _ in range(min(count, len(self.world.running))):
            self.world.end(random.choice(list(self.world.running)), random)

    @precondition(lambda self: self.world.batch is None)
    @rule()
    def take(self) -> None:
        if isinstance(self.world.take(), Drained):
            assert self.world.buffer.source.exhausted
            assert None not in self.world.heard.occurrences.values(), "drained with an occurrence undecided"

    @precondition(lambda self: self.world.batch is not None and self.world.mini_batches)
    @rule(random=RANDOM)
    def step(self, random: Random) -> None:
        self.world.step(random)

    @precondition(lambda self: self.world.batch is not None and not self.world.mini_batches)
    @rule()
    def settle(self) -> None:
        self.world.settle()

    @precondition(lambda self: self.world.buffer.clock.version > self.world.buffer.clock.published)
    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(lambda self: self.world.batch is None)
    @rule()
    def save(self) -> None:
        self.world.save()

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @invariant()
    def wait_never_drops_for_age(self) -> None:
        if self.world.setting.on_stale is OnStale.WAIT:
            assert not self.world.fates()[Fate.AGE]

    @invariant()
    def outstanding_groups_are_bounded(self) -> None:
        setting, buffer = self.world.setting, self.world.buffer
        batches = setting.staleness.max_staleness // setting.steps_on_a_batch + 1
        assert buffer.running_groups + buffer.buffered_groups <= batches * setting.groups_per_step


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
