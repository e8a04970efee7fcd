"""The buffer: groups from their start to the step that trains them. Nothing here waits; the run does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from fathom.buffer.books import Books
from fathom.buffer.buffer_state import BufferState, HeldGroup
from fathom.buffer.clock import Clock
from fathom.buffer.facts import Arrival, Drained, Fact, Taken, Waiting
from fathom.buffer.group import Ending, FinishedGroup, failure, without_rows
from fathom.buffer.source import OccurrenceSource
from fathom.buffer.training import BatchInTraining
from fathom.config.families import OnStale
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import StalenessConfig
from fathom.core.errors import BooksError, NoProgressError
from fathom.core.ids import GroupId, Occurrence, TaskId, TrajectoryId, group_id, trajectory_id
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import StepOutcome, TrainBatch
from fathom.core.records.trajectory import Trajectory, Ungraded
from fathom.ledger.events import AttemptMoved, GroupDequeued, GroupStarted, OccurrenceClosed, TrajectoryEnded

FRUITLESS_BATCHES = 32
"""The run ends when this many batches' worth of groups in a row gave nothing to train on."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """A group of which at least one member has not ended."""

    started: GroupStarted
    ended: dict[TrajectoryId, Trajectory] = field(default_factory=dict[TrajectoryId, Trajectory])


@final
class GroupBuffer:
    """Groups that run, are buffered or are in training; every move of them is a move in the books.

        start -> arrive (each member) -> [requeued | given up | buffered] -> take -> step (each) -> settle

    Bounded by admission, ordered by deadline (oldest first, `clock`), ties by arrival. One owner calls it, one call at
    a time; a call that raises BooksError leaves nothing to go on with. Private methods that yield facts act as they
    yield: their callers exhaust them.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        books: Books,
        source: OccurrenceSource,
        staleness: StalenessConfig,
        objective: ObjectiveConfig,
        group_size: int,
        incarnation: int,
    ) -> None:
        self.clock = clock
        self.books = books
        self.source = source
        self._staleness = staleness
        self._objective = objective
        self._group_size = group_size
        self._incarnation = incarnation
        self._running: dict[GroupId, _Running] = {}
        self._buffered: dict[GroupId, FinishedGroup] = {}
        self._in_training: BatchInTraining | None = None
        self._fruitless: Counter[Fate] = Counter()

    # ---- how it stands

    @property
    def running_groups(self) -> int:
        """Groups of which a member still runs."""
        return len(self._running)

    @property
    def running_trajectories(self) -> int:
        """Trajectories that have not ended."""
        return sum(len(item.started.members) - len(item.ended) for item in self._running.values())

    @property
    def buffered_groups(self) -> int:
        """Finished groups that wait for a batch."""
        return len(self._buffered)

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among running (by their start) and buffered groups. None: there are none."""
        running = [item.started.version for item in self._running.values()]
        buffered = [group.oldest_version for group in self._buffered.values()]
        return min((version for version in running + buffered if version is not None), default=None)

    # ---- groups start and end

    def may_start(self) -> bool:
        """Admission: would a group that starts now be trained in time, in its place behind all that wait?"""
        return self.clock.may_start(len(self._running) + len(self._buffered))

    def start_waits_for(self) -> str:
        """What admission waits for, for people. Empty: nothing, a group may start."""
        if self.may_start():
            return ""
        return (
            f"the staleness bound: {len(self._running)} groups run, {len(self._buffered)} are buffered, "
            f"version {self.clock.published} is served, the trainer is at {self.clock.version}"
        )

    def start(self, occurrence: Occurrence, task: TaskId) -> GroupStarted:
        """Start the next attempt at an occurrence drawn from the source; the event says what to run.

        Raises:
            BooksError: `may_start` is false, or the occurrence is closed, running, or not the next one.
        """
        if not self.may_start():
            raise BooksError(f"occurrence {occurrence.name} may not start: the staleness bound admits no group now")
        attempt = self.books.attempts_used(occurrence)
        group = group_id(occurrence, attempt, self._incarnation)
        members = tuple(trajectory_id(group, member) for member in range(self._group_size))
        self.books.start(occurrence, group, members)
        started = GroupStarted(
            group=group,
            occurrence=occurrence,
            attempt=attempt,
            task=task,
            members=members,
            version=self.clock.published,
        )
        self._running[group] = _Running(started=started)
        return started

    def arrive(self, trajectory: Trajectory, now_s: float) -> Arrival:
        """A member of a running group ended, well or badly; the last one decides what becomes of its group.

        Raises:
            BooksError: it is no member of a running group, or ended before.
        """
        header, payload = trajectory.header, trajectory.payload
        running = self._running.get(header.group)
        if running is None or header.id not in running.started.members or header.id in running.ended:
            raise BooksError(f"trajectory {header.id} is not running in group {header.group}")
        running.ended[header.id] = trajectory
        self.books.record(header.id, payload.num_sampled)
        oldest = payload.oldest_version
        calls = payload.calls
        ended = TrajectoryEnded(
            trajectory=header.id,
            arrival_age=None if oldest is None else self.clock.version - oldest,
            sampled_tokens=payload.num_sampled,
            prompt_tokens=sum(call.turn.start for call in calls),
            cached_tokens=sum(call.turn.cached_tokens for call in calls),
            drafted_tokens=sum(call.turn.drafted_tokens for call in calls),
            accepted_tokens=sum(call.turn.accepted_tokens for call in calls),
            turns=len(calls),
            known_tokens=sum(call.known_tokens for call in calls),
            ungraded=header.reward.cause if isinstance(header.reward, Ungraded) else "",
        )
        complete = len(running.ended) == len(running.started.members)
        return Arrival(ended=ended, facts=tuple(self._finish(running, now_s)) if complete else ())

    def _finish(self, running: _Running, now_s: float) -> Iterable[Fact]:
        started = running.started
        del self._running[started.group]
        graded: list[Trajectory] = []
        for name in started.members:
            member = running.ended[name]
            if ending := failure(member, self.clock.version):
                yield self._end(name, ending)
            else:
                graded.append(member)
        masked = self._objective.mask_truncated
        group = self._group(started.group, started.occurrence, started.version, now_s, graded, mask_truncated=masked)
        names = [member.header.id for member in graded]
        if len(graded) < (self._staleness.min_graded or len(started.members)):
            yield from self._run_again(group, names, Fate.TOO_FEW_GRADED)
        elif self._objective.filter_zero_variance and group.rewards_equal:
            yield from self._give_up(group, names, Ending(state=AttemptState.FILTERED, fate=Fate.VARIANCE))
        else:
            yield from self._hold(group)

    def _group(
        self,
        name: GroupId,
        occurrence: Occurrence,
        version: int,
        finished_s: float,
        graded: Iterable[Trajectory],
        *,
        mask_truncated: bool,
    ) -> FinishedGroup:
        return FinishedGroup.of(
            group=name,
            occurrence=occurrence,
            version=version,
            finished_s=finished_s,
            graded=tuple(graded),
            mask_truncated=mask_truncated,
            deadline=self.clock.deadline,
        )

    def _hold(self, group: FinishedGroup) -> Iterable[Fact]:
        """Buffer a group, if something of it can be trained."""
        trainable = group.trainable
        fates: list[Fate] = []
        for member in group.graded:
            name = member.header.id
            if name in trainable:
                self.books.buffer(name)
                yield self._moved(name, AttemptState.BUFFERED, None)
            else:
                ending = without_rows(member, self._objective.mask_truncated)
                fates.append(ending.fate)
                yield self._end(name, ending)
        if not trainable:
            yield self._close(group, fates[0])
            return
        self._buffered[group.group] = group
        yield from self._shed(group)

    def _shed(self, group: FinishedGroup) -> Iterable[Fact]:
        """Take what became too old out of a buffered group; under `requeue` that is the whole group."""
        if not group.stale(self.clock.meets):
            return
        if self._staleness.on_stale is OnStale.REQUEUE:
            del self._buffered[group.group]
            yield from self._run_again(group, group.trainable, Fate.AGE)
            return
        for name in group.remove_stale(self.clock.meets):
            yield self._end(name, Ending(state=AttemptState.DROPPED, fate=Fate.AGE))
        if not group.rows:
            del self._buffered[group.group]
            yield self._close(group, Fate.AGE)

    # ---- batches

    def take(self, now_s: float) -> Taken | Waiting | Drained:
        """The next batch: the `groups_per_step` groups with the earliest deadlines, fewer only as the last of the data.

        Ages are measured again. Under `wait` no batch is handed out whose steps would over-age a group left behind.

        Raises:
            BooksError: the last batch is not settled, or the books do not balance.
            NoProgressError: `FRUITLESS_BATCHES` batches' worth of groups in a row gave nothing to train on.
        """
        if self._in_training:
            raise BooksError("the batch in training must be settled before the next one is taken")
        self._require_progress()
        facts = [fact for group in list(self._buffered.values()) for fact in self._shed(group)]
        queue = sorted(self._buffered.values(), key=lambda group: group.deadline)
        size = self.clock.groups_per_step
        last_of_data = self.source.exhausted and not self._running
        if last_of_data and not queue:
            return Drained(facts=tuple(facts))
        if len(queue) < size and not last_of_data:
            reason = f"{size} finished groups: {len(queue)} are, {len(self._running)} run"
            return Waiting(reason=reason, facts=tuple(facts))
        batch, rest = queue[:size], queue[size:]
        # Once nothing runs, waiting would change nothing (and by the clock's invariant there is no reason to).
        waits = self._staleness.on_stale is OnStale.WAIT and bool(self._running)
        if waits and not self._may_leave(rest):
            oldest = min((item.started for item in self._running.values()), key=lambda started: started.version)
            reason = f"group {oldest.group}, started at version {oldest.version}: a step now would make it too old"
            return Waiting(reason=reason, facts=tuple(facts))
        return self._hand_out(batch, facts, now_s)

    def _may_leave(self, rest: list[FinishedGroup]) -> bool:
        started = (item.started.version for item in self._running.values())
        return self.clock.may_take(
            [group.deadline for group in rest] + [self.clock.deadline(version, version) for version in started]
        )

    def _hand_out(self, batch: list[FinishedGroup], facts: list[Fact], now_s: float) -> Taken:
        for group in batch:
            del self._buffered[group.group]
            oldest = group.oldest_version
            age = None if oldest is None else self.clock.version - oldest
            facts.append(GroupDequeued(group=group.group, age=age, waited_s=now_s - group.finished_s))
        self.books.check()
        self.clock.begin_batch()
        self._in_training = BatchInTraining(batch)
        return Taken(batch=TrainBatch(groups=tuple(group.to_train() for group in batch)), facts=tuple(facts))

    def step(self, outcome: StepOutcome) -> None:
        """Note a step on the batch in training; the clock goes on when the weights changed.

        Raises:
            BooksError: there is no batch, the step's number is not the next, or its rows do not fit the batch.
        """
        if self._in_training is None or outcome.number != self.clock.version + 1:
            raise BooksError(f"step {outcome.number} does not follow version {self.clock.version} on a batch taken")
        self._in_training.add(outcome, self.clock.version)
        if outcome.stepped:
            self.clock.step()

    def settle(self) -> tuple[Fact, ...]:
        """All steps on the batch are noted: close its attempts and occurrences.

        Raises:
            BooksError: there is no batch in training, or a row of it was never reported.
        """
        training = self._in_training
        if training is None:
            raise BooksError("there is no batch in training to settle")
        training.require_complete()
        facts = [fact for group in training.groups for fact in self._settle(group, training)]
        if any(isinstance(fact, OccurrenceClosed) and fact.trained for fact in facts):
            self._fruitless.clear()
        self._in_training = None
        self.clock.end_batch()
        self.books.check()
        return tuple(facts)

    def _settle(self, group: FinishedGroup, training: BatchInTraining) -> Iterable[Fact]:
        trainable = group.trainable
        any_trained = False
        for member in group.graded:
            name = member.header.id
            if name not in trainable:
                continue
            account = training.account(member)
            if account.trained:
                any_trained = True
                self.books.train(name, account.in_gradient, account.masked)
                yield self._moved(name, AttemptState.TRAINED, None)
            else:
                self.books.end(name, AttemptState.DROPPED, Fate.NO_STEP, account.masked)
                yield self._moved(name, AttemptState.DROPPED, Fate.NO_STEP)
        yield self._close(group, None if any_trained else Fate.NO_STEP)

    # ---- endings

    def _run_again(self, group: FinishedGroup, members: Sequence[TrajectoryId], fate: Fate) -> Iterable[Fact]:
        """The attempt failed whole: requeue its occurrence, or give it up when it has used up its attempts."""
        if self.books.attempts_used(group.occurrence) + 1 >= self._staleness.max_attempts:
            yield from self._give_up(group, members, Ending(state=AttemptState.DROPPED, fate=fate), Fate.ATTEMPTS)
            return
        for name in members:
            yield self._end(name, Ending(state=AttemptState.DROPPED, fate=Fate.REQUEUED, detail=fate))
        self.books.requeue(group.occurrence)
        self.source.requeue(group.occurrence)
        self._fruitless[fate] += 1

    def _give_up(
        self, group: FinishedGroup, members: Sequence[TrajectoryId], ending: Ending, why: Fate | None = None
    ) -> Iterable[Fact]:
        for name in members:
            yield self._end(name, ending)
        yield self._close(group, why or ending.fate)

    def _close(self, group: FinishedGroup, fate: Fate | None) -> OccurrenceClosed:
        self.books.close(group.occurrence, fate)
        if fate is not None:
            self._fruitless[fate] += 1
        return OccurrenceClosed(occurrence=group.occurrence, group=group.group, trained=fate is None, fate=fate)

    def _end(self, name: TrajectoryId, ending: Ending) -> AttemptMoved:
        self.books.end(name, ending.state, ending.fate)
        return self._moved(name, ending.state, ending.fate, ending.detail)

    def _moved(self, name: TrajectoryId, state: AttemptState, fate: Fate | None, detail: str = "") -> AttemptMoved:
        return AttemptMoved(trajectory=name, state=state, fate=fate, detail=detail, at_step=self.clock.version)

    def _require_progress(self) -> None:
        tries = FRUITLESS_BATCHES * self.clock.groups_per_step
        could_go_on = len(self._buffered) >= self.clock.groups_per_step and not self._fruitless[Fate.NO_STEP]
        if self._fruitless.total() >= tries and not could_go_on:
            counts = ", ".join(f"{count} {fate}" for fate, count in self._fruitless.most_common())
            raise NoProgressError(
                f"{self._fruitless.total()} groups in a row gave nothing to train on (the limit is {tries}): {counts}; "
                "look at their rewards and causes with `fathom trace`, then change the task, the filters or the bounds"
            )

    # ---- ends and resumes

    def stop(self) -> tuple[Fact, ...]:
        """The run ends: what is in flight is dropped; its occurrences stay open and run again after a resume."""
        self._running.clear()
        stopped = Ending(state=AttemptState.DROPPED, fate=Fate.STOPPED)
        return tuple(self._end(name, stopped) for name in self.books.in_flight())

    def snapshot(self) -> BufferState:
        """Everything a resume needs besides the records of `held` groups. Raises BooksError while a batch trains."""
        if self._in_training:
            raise BooksError("the batch in training must be settled before a checkpoint")
        self.books.check()
        held = (
            HeldGroup(
                group=group.group,
                occurrence=group.occurrence,
                version=group.version,
                finished_s=group.finished_s,
                graded=tuple(member.header.id for member in group.graded),
            )
            for group in self._buffered.values()
        )
        return BufferState(
            version=self.clock.version,
            source=self.source.snapshot(),
            books=self.books.snapshot(),
            held=tuple(held),
        )

    def restore(self, state: BufferState, load: Callable[[TrajectoryId], Trajectory]) -> tuple[Fact, ...]:
        """Make this new buffer, with its clock, books and source, go on from `state`.

        What was in flight is dropped and its occurrences come first from the source. Publish `state.version` before
        the first start. Returns the facts of this for the new incarnation.

        Raises:
            CheckpointError: the order of the data has changed.
            BooksError: the books in `state` do not balance.
        """
        self.clock.restore(state.version)
        self.books.restore(state.books)
        facts = self.stop()
        self.source.resume(state.source, self.books)
        for held in state.held:
            graded = map(load, held.graded)
            group = self._group(
                held.group, held.occurrence, held.version, held.finished_s, graded, mask_truncated=False
            )
            group.keep(self.books.is_buffered)  # it tells which members had rows, whatever the option is by now
            self._buffered[held.group] = group
        return facts
