"""A world around the buffer: a model of the books that only listens to facts, and checks everything it hears."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np
from buffer_records import outcome_of, trajectory

from fathom.buffer.books import Books
from fathom.buffer.buffer_state import BufferState
from fathom.buffer.clock import Clock
from fathom.buffer.facts import Drained, Fact, Taken, Waiting
from fathom.buffer.group_buffer import GroupBuffer
from fathom.buffer.source import OccurrenceSource
from fathom.config.families import OnStale
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import StalenessConfig
from fathom.core.ids import Occurrence, TaskId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import StepOutcome, TrainBatch
from fathom.core.records.trajectory import Trajectory, TrajectoryStatus
from fathom.ledger.events import AttemptMoved, GroupStarted, OccurrenceClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    groups_per_step: int = 2
    steps_on_a_batch: int = 1
    publish_every: int = 1
    slack: int = 1
    """Staleness above the smallest possible."""
    kv_slack: int | None = None
    on_stale: OnStale = OnStale.WAIT
    group_size: int = 2
    max_attempts: int = 2
    min_graded: int | None = None
    mask_truncated: bool = False
    filter_zero_variance: bool = False
    num_tasks: int = 7
    epochs: int | None = None

    @property
    def smallest(self) -> int:
        return self.steps_on_a_batch - 1 + self.publish_every - 1

    @property
    def staleness(self) -> StalenessConfig:
        return StalenessConfig(
            max_staleness=self.smallest + self.slack,
            max_kv_staleness=None if self.kv_slack is None else self.smallest + self.kv_slack,
            on_stale=self.on_stale,
            max_attempts=self.max_attempts,
            min_graded=None if self.min_graded is None else min(self.min_graded, self.group_size),
            publish_every=self.publish_every,
        )

    def buffer(self, incarnation: int = 1) -> GroupBuffer:
        return GroupBuffer(
            clock=Clock(
                groups_per_step=self.groups_per_step,
                steps_on_a_batch=self.steps_on_a_batch,
                staleness=self.staleness,
            ),
            books=Books(),
            source=OccurrenceSource(num_tasks=self.num_tasks, seed=3, shuffle=True, epochs=self.epochs),
            staleness=self.staleness,
            objective=ObjectiveConfig(
                mask_truncated=self.mask_truncated, filter_zero_variance=self.filter_zero_variance
            ),
            group_size=self.group_size,
            incarnation=incarnation,
        )


@dataclass(slots=True, kw_only=True)
class Heard:
    """The books as the facts tell them."""

    attempts: dict[TrajectoryId, tuple[AttemptState, Fate | None]] = field(default_factory=dict)
    occurrences: dict[Occurrence, tuple[bool, Fate | None] | None] = field(default_factory=dict)
    records: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    gradient: set[tuple[TrajectoryId, int, int]] = field(default_factory=set)
    """(trajectory, branch, position) of every token that ever had a gradient."""
    ages: list[int] = field(default_factory=list)
    version: int = 0


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.incarnation = 1
        self.buffer = setting.buffer()
        self.heard = Heard()
        self.checkpoint: tuple[bytes, Heard] | None = None
        self.running: dict[TrajectoryId, GroupStarted] = {}
        self.batch: TrainBatch | None = None
        self.mini_batches: list[list[Row]] = []
        self.save()

    # ---- what the run does

    def start(self) -> list[TrajectoryId]:
        draw = self.buffer.source.next()
        assert draw is not None
        known = self.heard.occurrences.get(draw.occurrence)
        assert known is None, "a closed occurrence was drawn again"
        started = self.buffer.start(draw.occurrence, TaskId(f"task{draw.task}"))
        self.heard.occurrences[draw.occurrence] = None
        for member in started.members:
            assert member not in self.heard.attempts
            self.heard.attempts[member] = AttemptState.IN_FLIGHT, None
            self.running[member] = started
        self.check()
        return list(started.members)

    def end(self, member: TrajectoryId, random: Random, *, bad: float = 0.2) -> None:
        """A member ends with tokens of versions between its group's start and the one served now."""
        started = self.running.pop(member)
        newest = self.buffer.clock.published
        branches = []
        for _ in range(random.choice([1, 1, 1, 2])):
            versions = sorted(random.randint(started.version, newest) for _ in range(random.choice([0, 1, 2, 3])))
            branches.append([(v, random.randint(started.version, v), random.random() < 0.8) for v in versions])
        status, reward = TrajectoryStatus.COMPLETED, float(random.random() < 0.5)
        if random.random() < bad:
            status = random.choice(list(TrajectoryStatus))
            failed = status in (TrajectoryStatus.ABORTED, TrajectoryStatus.FAILED)
            reward = None if failed or random.random() < 0.3 else reward
        record = trajectory(started, started.members.index(member), branches, reward=reward, status=status)
        self.heard.records[member] = record
        arrival = self.buffer.arrive(record, now_s=0.0)
        assert arrival.ended.sampled_tokens == record.payload.num_sampled
        self.listen(arrival.facts)

    def take(self) -> Taken | Waiting | Drained:
        result = self.buffer.take(now_s=0.0)
        if isinstance(result, Taken):
            self.batch = result.batch
            size = self.setting.groups_per_step
            last = self.buffer.source.exhausted and not self.running and not self.buffer.buffered_groups
            assert len(result.batch.groups) == size or (last and 0 < len(result.batch.groups) < size)
            trajectories = {row.trajectory: None for group in result.batch.groups for row in group.rows}
            self.mini_batches = [
                [
                    row
                    for group in result.batch.groups
                    for row in group.rows
                    if list(trajectories).index(row.trajectory) % self.setting.steps_on_a_batch == part
                ]
                for part in range(self.setting.steps_on_a_batch)
            ]
        self.listen(result.facts)
        return result

    def step(self, random: Random, *, idle: float = 0.1) -> None:
        rows = self.mini_batches.pop(0)
        before = self.buffer.clock.version
        stepped = bool(rows) and random.random() >= idle
        codes = [np.array([random.choice([-1, -1, -1, 0, 1]) for _ in row.positions], np.int8) for row in rows]
        done = outcome_of(before + 1, list(zip(rows, codes, strict=True)), stepped=stepped)
        self.buffer.step(done)
        self.heard.version += stepped
        assert self.buffer.clock.version == self.heard.version
        if stepped:
            self.note_gradient(done, before)
        self.check()

    def note_gradient(self, done: StepOutcome, before: int) -> None:
        """The contract itself, from the records as sampled: nothing over either bound, nothing twice."""
        staleness = self.setting.staleness
        for row in done.rows:
            branch = self.heard.records[row.trajectory].payload.branches[row.branch]
            among_sampled = np.cumsum(branch.sampled) - 1
            for position in row.positions[row.mask_codes == -1].tolist():
                age = before - int(branch.policy_version[among_sampled[position]])
                kv_age = before - int(branch.kv_version[among_sampled[position]])
                assert 0 <= age <= staleness.max_staleness
                assert kv_age <= staleness.kv_bound
                token = row.trajectory, row.branch, position
                assert token not in self.heard.gradient
                self.heard.gradient.add(token)
                self.heard.ages.append(age)

    def settle(self) -> None:
        self.batch = None
        self.listen(self.buffer.settle())

    def publish(self) -> None:
        self.buffer.clock.publish(self.buffer.clock.version)
        self.check()

    def save(self) -> None:
        state = msgspec.msgpack.encode(self.buffer.snapshot())
        self.checkpoint = state, copy.deepcopy(self.heard)

    def crash(self) -> None:
        assert self.checkpoint is not None
        state, heard = self.checkpoint
        self.incarnation += 1
        self.heard = copy.deepcopy(heard)
        self.running, self.batch, self.mini_batches = {}, None, []
        self.buffer = self.setting.buffer(self.incarnation)
        decoded = msgspec.msgpack.decode(state, type=BufferState)
        self.listen(self.buffer.restore(decoded, self.heard.records.__getitem__))

    # ---- what the model hears

    def listen(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            if isinstance(fact, AttemptMoved):
                before, _ = self.heard.attempts[fact.trajectory]
                assert not before.final, f"{fact.trajectory} moved after its end"
                if fact.state is AttemptState.TRAINED:
                    assert before is AttemptState.BUFFERED
                self.heard.attempts[fact.trajectory] = fact.state, fact.fate
            elif isinstance(fact, OccurrenceClosed):
                assert self.heard.occurrences[fact.occurrence] is None, "closed twice"
                self.heard.occurrences[fact.occurrence] = fact.trained, fact.fate
        self.check()

    def check(self) -> None:
        """The buffer's books say what the facts say, and balance."""
        self.buffer.books.check()
        state, heard = self.buffer.books.snapshot(), self.heard
        assert state.started == len(heard.attempts)
        live = {item.trajectory: (item.state, None) for item in state.live}
        assert live == {name: where for name, where in heard.attempts.items() if not where[0].final}
        ended = Counter(where for where in heard.attempts.values() if where[0].final)
        assert {(item.state, item.fate): item.count for item in state.ended} == ended
        assert {entry.occurrence for entry in state.open} == {o for o, c in heard.occurrences.items() if c is None}
        closed = Counter(c for c in heard.occurrences.values() if c is not None)
        assert state.trained == closed[True, None]
        assert state.given_up == {fate: count for (trained, fate), count in closed.items() if not trained}
        if self.batch is None:  # tokens are booked when the batch is settled
            assert state.gradient_tokens == len(heard.gradient)
        recorded = sum(heard.records[name].payload.num_sampled for name in heard.attempts if name in heard.records)
        assert state.recorded_tokens == recorded
        pending = sum(item.tokens or 0 for item in state.live)
        assert state.recorded_tokens == state.gradient_tokens + sum(state.masked_tokens.values()) + pending

    def fates(self) -> Counter[Fate | None]:
        return Counter(fate for _, fate in self.heard.attempts.values())
