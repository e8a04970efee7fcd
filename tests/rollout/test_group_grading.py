"""Members of a group wait for each other, are compared once, and each gets its own part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import GraderDeadError
from fathom.core.ids import GroupId, Occurrence, TaskId, trajectory_id
from fathom.core.ports.environment import GroupGrade, GroupMember, Task
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import (
    Graded,
    Reward,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Ungraded,
)
from fathom.rollout.episode import EndedEpisode, EpisodePlan
from fathom.rollout.group_grading import GroupGrading

LOST = Ungraded(cause="grader_error", detail="as asked")


def plan(member: int, group: str = "g", purpose: Purpose = Purpose.ROLLOUT) -> EpisodePlan:
    return EpisodePlan(
        group=GroupId(group),
        member=member,
        occurrence=Occurrence(epoch=0, index=0),
        attempt=0,
        task=Task(id=TaskId("t"), messages=(), answer=""),
        prompt_ids=np.empty(0, np.int32),
        sampling=SamplingParams(),
        max_new_tokens=1,
        seed=0,
        priority=0,
        purpose=purpose,
        pinned=None,
        barrier=None,
    )


def ended(of: EpisodePlan, reward: Reward) -> EndedEpisode:
    header = TrajectoryHeader(
        id=trajectory_id(of.group, of.member),
        group=of.group,
        member=of.member,
        occurrence=of.occurrence,
        attempt=of.attempt,
        task=of.task.id,
        status=TrajectoryStatus.COMPLETED,
        cause="",
        reward=reward,
        tokenizer=TokenizerIdentity("aa", "bb"),
        adapter=None,
        started_s=0.0,
        ended_s=1.0,
    )
    trajectory = Trajectory(header=header, payload=TokenPayload(versions=(), branches=()))
    return EndedEpisode(trajectory=trajectory, messages=(Message(role=Role.ASSISTANT, content=f"said {of.member}"),))


def worth(value: float) -> Graded:
    return Graded(components={"own": value}, grader="g/1", answer_found=True)


class World:
    """Episodes that end when they are let, and a comparison that ranks members by what they are worth."""

    def __init__(self, rewards: Sequence[Reward], *, min_graded: int, fails: bool = False) -> None:
        self.rewards = rewards
        self.fails = fails
        self.asked: list[list[int]] = []
        self.gates = [asyncio.Event() for _ in rewards]
        self.grading = GroupGrading(
            play=self.play, compare=self.compare, group_size=len(rewards), min_graded=min_graded
        )

    async def play(self, of: EpisodePlan) -> EndedEpisode:
        await self.gates[of.member].wait()
        return ended(of, self.rewards[of.member])

    async def compare(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade | Ungraded:
        self.asked.append([member.member for member in members])
        assert all(member.answer == f"said {member.member}" for member in members)
        if self.fails:
            return Ungraded(cause="group_error", detail="as asked")
        order = sorted(range(len(members)), key=lambda place: members[place].reward.total)
        return GroupGrade(
            components={"rank": tuple(float(order.index(place)) for place in range(len(members)))}, grader="r/1"
        )


async def let(world: World, order: Sequence[int]) -> list[Trajectory]:
    """End the members one after the other; nobody comes out before the last."""
    running = [asyncio.create_task(world.grading.run(plan(member))) for member in range(len(world.rewards))]
    for member in order:
        assert not any(task.done() for task in running)
        assert not world.asked
        world.gates[member].set()
        for _ in range(3):
            await asyncio.sleep(0)
    return await asyncio.gather(*running)


@given(
    st.lists(st.one_of(st.just(None), st.integers(0, 3)), min_size=1, max_size=6).flatmap(
        lambda values: st.tuples(st.just(values), st.permutations(range(len(values))), st.integers(0, len(values)))
    ),
    st.booleans(),
)
def test_whatever_the_order_each_member_gets_its_part_once(case, fails: bool) -> None:
    values, order, min_graded = case
    rewards = [LOST if value is None else worth(value) for value in values]
    graded = [member for member, value in enumerate(values) if value is not None]

    async def play() -> None:
        world = World(rewards, min_graded=min_graded, fails=fails)
        group = await let(world, order)
        compared = len(graded) >= max(1, min_graded)
        assert world.asked == ([graded] if compared else [])
        for member, trajectory in enumerate(group):
            assert trajectory.header.member == member
            reward = trajectory.header.reward
            if values[member] is None or not compared:
                assert reward == rewards[member]
            elif fails:
                assert reward == Ungraded(cause="group_error", detail="as asked")
            else:
                assert isinstance(reward, Graded)
                assert reward.components["own"] == values[member]
                assert reward.grader == "g/1 + r/1"
        ranks = [t.header.reward.components.get("rank") for t in group if isinstance(t.header.reward, Graded)]
        assert not compared or fails or sorted(ranks) == list(range(len(graded)))

    asyncio.run(play())


def test_a_group_that_runs_again_is_compared_again_and_by_itself() -> None:
    async def play() -> None:
        world = World([worth(0), worth(1)], min_graded=2)
        for gate in world.gates:
            gate.set()
        plans = [plan(member, group) for group in ("g/a0", "g/a1") for member in (0, 1)]
        group = await asyncio.gather(*map(world.grading.run, plans))
        assert world.asked == [[0, 1], [0, 1]]
        assert [t.header.reward.components["rank"] for t in group] == [0.0, 1.0, 0.0, 1.0]

    asyncio.run(play())


def test_evaluations_wait_for_nobody() -> None:
    async def play() -> None:
        world = World([worth(0), worth(1)], min_graded=2)
        world.gates[1].set()
        alone = await world.grading.run(replace(plan(1), purpose=Purpose.EVALUATION))
        assert alone.header.reward == worth(1)
        assert not world.asked

    asyncio.run(play())


def test_what_ends_the_run_ends_those_who_wait() -> None:
    async def dies(task: Task, members: Sequence[GroupMember]) -> GroupGrade:
        raise GraderDeadError("gone")

    async def play_at_once(of: EpisodePlan) -> EndedEpisode:
        return ended(of, worth(1))

    async def play() -> None:
        grading = GroupGrading(play=play_at_once, compare=dies, group_size=3, min_graded=3)
        ends = await asyncio.gather(*(grading.run(plan(member)) for member in range(3)), return_exceptions=True)
        assert sum(isinstance(end, GraderDeadError) for end in ends) == 1
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 2

    asyncio.run(play())


def test_a_member_that_is_given_up_takes_nothing_from_the_others() -> None:
    async def play() -> None:
        world = World([worth(0), worth(1), worth(2)], min_graded=3)
        running = [asyncio.create_task(world.grading.run(plan(member))) for member in range(3)]
        world.gates[0].set()
        await asyncio.sleep(0)
        running[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        world.gates[1].set()
        world.gates[2].set()
        rest = await asyncio.gather(*running[1:])
        assert [t.header.reward.components["rank"] for t in rest] == [1.0, 2.0]

    asyncio.run(play())
