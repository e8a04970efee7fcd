"""Dynamic filtering of groups in which agents acted: replaced by others, until nothing else is left to try."""

from __future__ import annotations

import pytest
from buffer_records import trajectory
from buffer_world import Setting
from msgspec.structs import replace

from fathom.buffer.facts import Taken
from fathom.buffer.group_buffer import FRUITLESS_BATCHES, GroupBuffer
from fathom.core.errors import NoProgressError
from fathom.core.ids import TaskId
from fathom.core.records.states import Fate
from fathom.core.records.trajectory import Graded, SessionFacts, Trajectory
from fathom.ledger.events import GroupStarted, OccurrenceClosed

FACTS = SessionFacts(turns=2, matched={"exact": 1}, rendered_whole=0, acting="ended", detail="", fault="")
PARTS = {"a": 0.1, "b": 0.2, "c": 0.3}


def talked(started: GroupStarted, member: int, parts: dict[str, float]) -> Trajectory:
    """An agent's trajectory: two branches, several components."""
    made = trajectory(started, member, [[(0, 0, True)], [(0, 0, True), (0, 0, True)]])
    reward = Graded(components=parts, grader="talk/1", answer_found=True)
    return replace(made, header=replace(made.header, reward=reward, session=FACTS))


def play(buffer: GroupBuffer, *rewards: dict[str, float]) -> list[Fate | None]:
    """Start the next group and end its members; returns what its occurrence was closed with, if it was."""
    draw = buffer.source.next()
    assert draw is not None
    started = buffer.start(draw.occurrence, TaskId(f"t{draw.task}"))
    facts = [fact for m, parts in enumerate(rewards) for fact in buffer.arrive(talked(started, m, parts), 0.0).facts]
    return [fact.fate for fact in facts if isinstance(fact, OccurrenceClosed)]


def test_groups_worth_the_same_are_replaced_and_a_run_of_them_ends() -> None:
    buffer = Setting(groups_per_step=1, filter_zero_variance=True, slack=100).buffer()
    backwards = dict(reversed(PARTS.items()))
    assert sum(PARTS.values()) != sum(backwards.values()), "they differ in their last bit"
    for _ in range(FRUITLESS_BATCHES - 1):
        assert play(buffer, PARTS, backwards) == [Fate.VARIANCE]
        assert not isinstance(buffer.take(0.0), Taken)
        assert buffer.may_start(), "the place of what was filtered is free"
    assert play(buffer, PARTS, backwards) == [Fate.VARIANCE]
    with pytest.raises(NoProgressError, match=f"{FRUITLESS_BATCHES} variance"):
        buffer.take(0.0)


def test_a_group_that_differs_takes_the_place_of_those_filtered() -> None:
    buffer = Setting(groups_per_step=1, filter_zero_variance=True, slack=100).buffer()
    assert [play(buffer, PARTS, PARTS) for _ in range(3)] == [[Fate.VARIANCE]] * 3
    assert play(buffer, PARTS, PARTS | {"c": 0.301}) == []
    taken = buffer.take(0.0)
    assert isinstance(taken, Taken)
    (group,) = taken.batch.groups
    assert len(group.rows) == 4, "a row for each branch of both members"
