"""What becomes of a group, case by case."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from buffer_records import Token, code_of, outcome, outcome_of, trajectory
from buffer_world import Setting

from fathom.buffer.buffer_state import BufferState
from fathom.buffer.facts import Drained, Fact, Taken, Waiting
from fathom.buffer.group import FinishedGroup
from fathom.buffer.group_buffer import GroupBuffer
from fathom.buffer.training import BatchInTraining
from fathom.config.families import OnStale
from fathom.core.errors import BooksError
from fathom.core.ids import TaskId, TrajectoryId
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import MaskReason
from fathom.core.records.trajectory import Trajectory, TrajectoryStatus
from fathom.ledger.events import AttemptMoved, GroupDequeued, GroupStarted, OccurrenceClosed

ONE: list[list[Token]] = [[(0, 0, True)]]
"""One branch, one sampled token of version 0, with loss."""


def start(buffer: GroupBuffer) -> GroupStarted:
    draw = buffer.source.next()
    assert draw is not None
    return buffer.start(draw.occurrence, TaskId(str(draw.task)))


def finish(buffer: GroupBuffer, members: list[Trajectory]) -> list[Fact]:
    return [fact for member in members for fact in buffer.arrive(member, now_s=10.0).facts]


def states(facts: list[Fact] | tuple[Fact, ...]) -> list[tuple[AttemptState, Fate | None]]:
    return [(fact.state, fact.fate) for fact in facts if isinstance(fact, AttemptMoved)]


def closings(facts: list[Fact] | tuple[Fact, ...]) -> list[Fate | None]:
    return [fact.fate for fact in facts if isinstance(fact, OccurrenceClosed)]


def train(buffer: GroupBuffer, *, stepped: bool = True) -> tuple[Fact, ...]:
    """Take a batch, one step on all of it, settle, publish."""
    taken = buffer.take(now_s=12.0)
    assert isinstance(taken, Taken), taken
    rows = [row for group in taken.batch.groups for row in group.rows]
    buffer.step(outcome(buffer.clock.version + 1, rows, stepped=stepped))
    facts = buffer.settle()
    buffer.clock.publish(buffer.clock.version)
    return facts


SOLO = Setting(groups_per_step=1, group_size=2, slack=2)


def test_a_group_is_trained_when_its_members_are() -> None:
    buffer = SOLO.buffer()
    group = start(buffer)
    assert buffer.running_trajectories == 2
    first = buffer.arrive(trajectory(group, 0, ONE, reward=1.0), now_s=9.0)
    assert (first.facts, first.ended.arrival_age, first.ended.sampled_tokens, first.ended.prompt_tokens) == (
        (),
        0,
        1,
        1,
    )
    assert states(finish(buffer, [trajectory(group, 1, ONE)])) == [(AttemptState.BUFFERED, None)] * 2
    taken = buffer.take(now_s=12.5)
    assert isinstance(taken, Taken)
    assert taken.facts == (GroupDequeued(group=group.group, age=0, waited_s=2.5),)
    assert list(taken.batch.groups[0].rewards.values()) == [1.0, 0.0]
    buffer.step(outcome(1, taken.batch.groups[0].rows))
    facts = buffer.settle()
    assert states(facts) == [(AttemptState.TRAINED, None)] * 2
    assert closings(facts) == [None]
    assert isinstance(buffer.take(now_s=0.0), Waiting)


@pytest.mark.parametrize(
    ("status", "cause", "fate"),
    [
        (TrajectoryStatus.ABORTED, "aborted", Fate.ABORTED),
        (TrajectoryStatus.FAILED, "engine_error", Fate.INFRASTRUCTURE),
        (TrajectoryStatus.FAILED, "refused", Fate.REFUSED),
        (TrajectoryStatus.COMPLETED, "grader_timeout", Fate.UNGRADED),
        (TrajectoryStatus.TRUNCATED, "grader_error", Fate.UNGRADED),
    ],
)
def test_a_failed_member_is_no_reward_of_zero(status: TrajectoryStatus, cause: str, fate: Fate) -> None:
    """Rewards 1, 0 and one failure: with min_graded = 2 the failure is in neither the baseline nor the gradient."""
    buffer = Setting(groups_per_step=1, group_size=3, min_graded=2).buffer()
    group = start(buffer)
    failed = trajectory(group, 2, ONE, reward=None, status=status, cause=cause)
    facts = finish(buffer, [trajectory(group, 0, ONE, reward=1.0), failed, trajectory(group, 1, ONE)])
    assert states(facts)[0] == (AttemptState.FAILED, fate)
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    assert taken.batch.groups[0].rewards == {group.members[0]: 1.0, group.members[1]: 0.0}


def test_too_few_graded_runs_again_until_its_attempts_are_used_up() -> None:
    buffer = Setting(groups_per_step=1, group_size=2, max_attempts=2).buffer()
    for attempt in (0, 1):
        group = start(buffer)
        assert (group.attempt, group.occurrence.index) == (attempt, 0)
        failed = trajectory(group, 1, ONE, reward=None)
        facts = finish(buffer, [trajectory(group, 0, ONE), failed])
        dropped = Fate.REQUEUED if attempt == 0 else Fate.TOO_FEW_GRADED
        assert states(facts) == [(AttemptState.FAILED, Fate.UNGRADED), (AttemptState.DROPPED, dropped)]
        assert closings(facts) == ([] if attempt == 0 else [Fate.ATTEMPTS])
    assert start(buffer).occurrence.index == 1


def test_truncated_members_train_unless_masked() -> None:
    for masked in (False, True):
        buffer = Setting(groups_per_step=1, mask_truncated=masked).buffer()
        group = start(buffer)
        cut = trajectory(group, 1, ONE, reward=1.0, status=TrajectoryStatus.TRUNCATED)
        facts = finish(buffer, [trajectory(group, 0, ONE), cut])
        assert ((AttemptState.FILTERED, Fate.TRUNCATED) in states(facts)) is masked
        taken = buffer.take(now_s=0.0)
        assert isinstance(taken, Taken)
        (batch,) = taken.batch.groups
        assert batch.rewards[cut.header.id] == 1.0, "the reward stays in the baseline"
        assert batch.truncated == {cut.header.id}
        assert len(batch.rows) == (1 if masked else 2)
        buffer.step(outcome(1, batch.rows))
        buffer.settle()
        expected = {MaskReason.TRUNCATED: 1} if masked else {}
        assert buffer.books.snapshot().masked_tokens == expected


def test_equal_rewards_stay_unless_the_filter_is_on() -> None:
    for filtered in (False, True):
        buffer = Setting(groups_per_step=1, filter_zero_variance=filtered).buffer()
        group = start(buffer)
        facts = finish(buffer, [trajectory(group, 0, ONE, reward=0.1 + 0.2), trajectory(group, 1, ONE, reward=0.3)])
        assert closings(facts) == ([Fate.VARIANCE] if filtered else [])
        assert buffer.buffered_groups == (0 if filtered else 1)
    group = start(buffer)
    finish(buffer, [trajectory(group, 0, ONE, reward=0.0), trajectory(group, 1, ONE, reward=0.001)])
    assert buffer.buffered_groups == 1, "a small difference is a difference"


def test_nothing_to_train_is_given_up_with_its_reason() -> None:
    for branches, fate in (([[]], Fate.EMPTY), ([[(0, 0, False)]], Fate.ABANDONED)):
        buffer = SOLO.buffer()
        group = start(buffer)
        facts = finish(buffer, [trajectory(group, m, branches, reward=float(m)) for m in (0, 1)])
        assert states(facts) == [(AttemptState.DROPPED, fate)] * 2
        assert closings(facts) == [fate]


def test_a_token_of_a_version_not_made_yet_is_refused() -> None:
    buffer = Setting(groups_per_step=1, min_graded=1).buffer()
    group = start(buffer)
    facts = finish(buffer, [trajectory(group, 0, ONE), trajectory(group, 1, [[(1, 0, True)]])])
    assert states(facts)[0] == (AttemptState.FAILED, Fate.REFUSED)


@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.REQUEUE])
def test_one_old_token_costs_its_row_and_not_its_reward(on_stale: OnStale) -> None:
    """S = 1; a slow group of version 0 ends at version 1 in time, and waits behind one more step."""
    buffer = Setting(groups_per_step=1, slack=1, on_stale=on_stale).buffer()
    slow, quick = start(buffer), start(buffer)
    finish(buffer, [trajectory(quick, m, ONE, reward=float(m)) for m in (0, 1)])
    train(buffer)
    other = start(buffer)
    finish(buffer, [trajectory(other, m, [[(1, 1, True)]], reward=float(m)) for m in (0, 1)])
    train(buffer)
    mixed = [[(0, 0, True), (2, 1, True)]]
    facts = finish(buffer, [trajectory(slow, 0, mixed, reward=1.0), trajectory(slow, 1, [[(2, 2, True)]])])
    if on_stale is OnStale.REQUEUE:
        assert states(facts)[-2:] == [(AttemptState.DROPPED, Fate.REQUEUED)] * 2
        assert buffer.source.next().occurrence == slow.occurrence  # pyright: ignore[reportOptionalMemberAccess]
        return
    assert states(facts)[-1] == (AttemptState.DROPPED, Fate.AGE)
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    (batch,) = taken.batch.groups
    assert batch.rewards == {slow.members[0]: 1.0, slow.members[1]: 0.0}
    assert [row.trajectory for row in batch.rows] == [slow.members[1]]
    assert buffer.books.snapshot().masked_tokens == {MaskReason.AGE: 2}


def test_rows_must_keep_the_bound_at_the_last_step_on_their_batch() -> None:
    """S = 1 with two steps on a batch: at version 1 a token of version 0 has age 1 first and age 2 last."""
    buffer = Setting(groups_per_step=1, steps_on_a_batch=2, slack=0, on_stale=OnStale.DROP, group_size=1).buffer()
    group = start(buffer)
    finish(buffer, [trajectory(group, 0, ONE)])
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    buffer.step(outcome(1, taken.batch.groups[0].rows))
    buffer.step(outcome(2, [], stepped=False))
    buffer.settle()
    buffer.clock.publish(1)
    group = start(buffer)
    assert states(finish(buffer, [trajectory(group, 0, ONE)]))[-1] == (AttemptState.DROPPED, Fate.AGE)


def test_newer_tokens_than_promised_give_the_trainer_more_room() -> None:
    """Under `wait` a group counts by its start while it runs, and by its own tokens once it has ended."""
    buffer = Setting(groups_per_step=1, slack=2, group_size=1).buffer()
    late, *others = [start(buffer) for _ in range(3)]
    for number, other in enumerate(others):
        finish(buffer, [trajectory(other, 0, [[(0, 0, True)]])])
        if number == 0:
            train(buffer)
    newest = start(buffer)
    finish(buffer, [trajectory(newest, 0, [[(1, 1, True)]])])
    train(buffer)
    assert isinstance(waiting := buffer.take(now_s=0.0), Waiting)
    assert late.group in waiting.reason
    finish(buffer, [trajectory(late, 0, [[(2, 2, True)]])])
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    assert [group.group for group in taken.batch.groups] == [newest.group], "the one with the earliest deadline"


def test_every_sampled_token_of_a_batch_has_one_place() -> None:
    buffer = Setting(groups_per_step=1, group_size=1).buffer()
    group = start(buffer)
    finish(buffer, [trajectory(group, 0, [[(0, 0, True), (0, 0, False), (0, 0, True)], [(0, 0, True)]])])
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    first, second = taken.batch.groups[0].rows
    vetoed = outcome(1, [second], code=code_of(MaskReason.VETO))
    buffer.step(msgspec.structs.replace(vetoed, rows=outcome(1, [first]).rows + vetoed.rows))
    buffer.settle()
    state = buffer.books.snapshot()
    assert state.gradient_tokens == 2
    assert state.masked_tokens == {MaskReason.VETO: 1, MaskReason.NO_LOSS: 1}


def test_a_trajectory_that_lost_one_of_its_rows_is_trained_on_the_other() -> None:
    """S = 0: the second branch still read keys and values of version 0, as no engine should have let it."""
    buffer = Setting(groups_per_step=1, group_size=1, slack=0).buffer()
    finish(buffer, [trajectory(start(buffer), 0, ONE)])
    train(buffer)
    finish(buffer, [trajectory(start(buffer), 0, [[(1, 1, True)], [(1, 0, True), (1, 1, True)]])])
    assert closings(train(buffer)) == [None]
    state = buffer.books.snapshot()
    assert (state.gradient_tokens, state.masked_tokens) == (2, {MaskReason.AGE: 2})


def test_a_row_over_its_bound_at_the_step_is_never_accepted() -> None:
    buffer = Setting(groups_per_step=1, group_size=1, slack=1).buffer()
    member = trajectory(start(buffer), 0, ONE)
    group = FinishedGroup.of(
        group=member.header.group,
        occurrence=member.header.occurrence,
        version=0,
        finished_s=0.0,
        graded=[member],
        mask_truncated=False,
        deadline=buffer.clock.deadline,
    )
    BatchInTraining([group]).add(outcome(2, group.rows), version=1)
    with pytest.raises(BooksError, match="over its age bound"):
        BatchInTraining([group]).add(outcome(3, group.rows), version=2)


def test_a_step_without_effect_trains_nothing() -> None:
    buffer = SOLO.buffer()
    group = start(buffer)
    finish(buffer, [trajectory(group, m, ONE) for m in (0, 1)])
    facts = train(buffer, stepped=False)
    assert states(facts) == [(AttemptState.DROPPED, Fate.NO_STEP)] * 2
    assert (closings(facts), buffer.clock.version) == ([Fate.NO_STEP], 0)
    assert buffer.books.snapshot().masked_tokens == {MaskReason.NOT_TRAINED: 2}


def test_what_the_trainer_reports_must_fit_the_batch() -> None:
    buffer = SOLO.buffer()
    group = start(buffer)
    finish(buffer, [trajectory(group, m, ONE) for m in (0, 1)])
    with pytest.raises(BooksError, match="does not follow version 0 on a batch taken"):
        buffer.step(outcome(1, []))
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    rows = taken.batch.groups[0].rows
    with pytest.raises(BooksError, match="must be settled"):
        buffer.take(now_s=0.0)
    with pytest.raises(BooksError, match="before a checkpoint"):
        buffer.snapshot()
    with pytest.raises(BooksError, match="step 7 does not follow version 0"):
        buffer.step(outcome(7, rows))
    no_codes = [(row, np.empty(0, np.int8)) for row in rows]
    with pytest.raises(BooksError, match="reports 0 tokens"):
        buffer.step(outcome_of(1, no_codes, stepped=True))


def test_a_row_never_reported_is_missed() -> None:
    buffer = SOLO.buffer()
    group = start(buffer)
    finish(buffer, [trajectory(group, m, ONE) for m in (0, 1)])
    taken = buffer.take(now_s=0.0)
    assert isinstance(taken, Taken)
    buffer.step(outcome(1, taken.batch.groups[0].rows[:1]))
    with pytest.raises(BooksError, match=f"never reported rows of {group.members[1]}"):
        buffer.settle()


def test_an_end_counts_once() -> None:
    buffer = SOLO.buffer()
    group = start(buffer)
    buffer.arrive(trajectory(group, 0, ONE), now_s=0.0)
    with pytest.raises(BooksError, match="is not running"):
        buffer.arrive(trajectory(group, 0, ONE), now_s=0.0)


def test_a_start_that_admission_forbids_is_refused() -> None:
    buffer = Setting(groups_per_step=1, slack=0).buffer()
    start(buffer)
    assert "the staleness bound: 1 groups run" in buffer.start_waits_for()
    with pytest.raises(BooksError, match="admits no group now"):
        start(buffer)


def test_the_last_batch_may_be_smaller_and_then_the_data_are_drained() -> None:
    buffer = Setting(groups_per_step=2, slack=4, group_size=1, num_tasks=3, epochs=1).buffer()
    for group in [start(buffer) for _ in range(3)]:
        finish(buffer, [trajectory(group, 0, ONE)])
    train(buffer)
    train(buffer)
    assert isinstance(buffer.take(now_s=0.0), Drained)
    assert buffer.books.snapshot().trained == 3


def test_a_resume_keeps_what_was_buffered_and_runs_again_what_was_in_flight() -> None:
    """One buffered group with a member lost to age, one running group with a member that had ended."""
    setting = Setting(groups_per_step=1, slack=1, on_stale=OnStale.DROP)
    buffer, records = setting.buffer(), dict[TrajectoryId, Trajectory]()
    slow, quick = start(buffer), start(buffer)
    finish(buffer, [trajectory(quick, m, ONE) for m in (0, 1)])
    train(buffer)
    third = start(buffer)
    finish(buffer, [trajectory(third, m, [[(1, 1, True)]]) for m in (0, 1)])
    train(buffer)
    members = [trajectory(slow, 0, ONE, reward=1.0), trajectory(slow, 1, [[(2, 2, True)]])]
    records |= {member.header.id: member for member in members}
    assert (AttemptState.DROPPED, Fate.AGE) in states(finish(buffer, members))
    running = start(buffer)
    buffer.arrive(trajectory(running, 0, [[(2, 2, True)]]), now_s=0.0)
    stored = msgspec.msgpack.encode(buffer.snapshot())

    resumed = setting.buffer(incarnation=2)
    facts = resumed.restore(msgspec.msgpack.decode(stored, type=BufferState), records.__getitem__)
    assert states(facts) == [(AttemptState.DROPPED, Fate.STOPPED)] * 2
    assert (resumed.clock.version, resumed.clock.published, resumed.buffered_groups) == (2, 2, 1)
    again = start(resumed)
    assert (again.occurrence, again.attempt) == (running.occurrence, running.attempt)
    assert again.group != running.group
    taken = resumed.take(now_s=0.0)
    assert isinstance(taken, Taken)
    (batch,) = taken.batch.groups
    assert [row.trajectory for row in batch.rows] == [slow.members[1]]
    assert batch.rewards == {slow.members[0]: 1.0, slow.members[1]: 0.0}
    resumed.step(outcome(3, batch.rows))
    assert closings(resumed.settle()) == [None]


def test_a_resume_that_masks_truncated_members_still_settles_those_that_were_buffered() -> None:
    """The option was edited in between; what was buffered without it has its place in the books."""
    buffer = Setting(groups_per_step=1).buffer()
    group = start(buffer)
    members = [trajectory(group, m, ONE, reward=float(m), status=TrajectoryStatus.TRUNCATED) for m in (0, 1)]
    finish(buffer, members)
    records = {member.header.id: member for member in members}

    resumed = Setting(groups_per_step=1, mask_truncated=True).buffer(incarnation=2)
    resumed.restore(buffer.snapshot(), records.__getitem__)
    taken = resumed.take(now_s=0.0)
    assert isinstance(taken, Taken)
    (batch,) = taken.batch.groups
    assert batch.truncated == set(group.members), "the trainer masks them"
    resumed.step(outcome(1, batch.rows, stepped=False))
    assert states(resumed.settle()) == [(AttemptState.DROPPED, Fate.NO_STEP)] * 2


def test_stopping_leaves_nothing_in_flight() -> None:
    buffer = SOLO.buffer()
    start(buffer)
    assert states(buffer.stop()) == [(AttemptState.DROPPED, Fate.STOPPED)] * 2
    assert (buffer.running_groups, buffer.books.in_flight(), len(buffer.books.idle())) == (0, [], 1)
