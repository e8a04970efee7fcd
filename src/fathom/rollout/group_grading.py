"""Rewards that depend on the other members: a group's trajectories wait for each other, and are compared once.

play each member ──> the last one has ended ──> compare those that were graded ──> every member ends with its part

Only environments that declare `grade_group` pay for this; what waits here counts as in flight. A group that is run
again has another name, so it is compared again, and what was compared before is gone with its trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from msgspec.structs import replace

from fathom.core.ids import GroupId
from fathom.core.ports.environment import GroupGrade, GroupMember, Task
from fathom.core.records.sampling import Purpose
from fathom.core.records.trajectory import Graded, Reward, Trajectory, Ungraded
from fathom.rollout.episode import EndedEpisode, EpisodePlan

PlayEpisode = Callable[[EpisodePlan], Awaitable[EndedEpisode]]
Compare = Callable[[Task, Sequence[GroupMember]], Awaitable[GroupGrade | Ungraded]]


@dataclass(slots=True)
class _Group:
    """A group of which a member has not ended."""

    rewards: asyncio.Future[dict[int, Reward]]
    """By member, once it was compared; members that stay as they are are missing."""
    ended: dict[int, EndedEpisode] = field(default_factory=dict[int, EndedEpisode])


@final
class GroupGrading:
    """A runner: plays trajectories, and gives each its part of what the comparison of its group says."""

    def __init__(self, *, play: PlayEpisode, compare: Compare, group_size: int, min_graded: int) -> None:
        """Nothing starts yet.

        Args:
            play: plays one episode.
            compare: compares graded members, under a deadline of its own.
            group_size: members of a group. All must be played at the same time: they wait for each other.
            min_graded: a group with fewer graded members is not compared, for it will not be trained.
        """
        self._play = play
        self._compare = compare
        self._group_size = group_size
        self._min_graded = max(1, min_graded)
        self._groups: dict[GroupId, _Group] = {}

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Play; of a rollout, end when the whole group has. Raises what playing and comparing raise."""
        if plan.purpose is not Purpose.ROLLOUT:
            return (await self._play(plan)).trajectory
        if plan.group not in self._groups:
            self._groups[plan.group] = _Group(asyncio.get_running_loop().create_future())
        group = self._groups[plan.group]
        ended = await self._play(plan)
        group.ended[plan.member] = ended
        if len(group.ended) == self._group_size:
            del self._groups[plan.group]
            await self._finish(plan.task, group)
        rewards = await asyncio.shield(group.rewards)  # one member that is given up takes nothing from the others
        return _with_reward(ended.trajectory, rewards.get(plan.member))

    async def _finish(self, task: Task, group: _Group) -> None:
        try:
            rewards = await self._rewards(task, group.ended)
        except BaseException:
            group.rewards.cancel()  # those who wait end, too
            raise
        group.rewards.set_result(rewards)

    async def _rewards(self, task: Task, ended: dict[int, EndedEpisode]) -> dict[int, Reward]:
        members = [
            GroupMember(member=place, messages=ended[place].messages, reward=reward)
            for place in sorted(ended)
            if isinstance(reward := ended[place].trajectory.header.reward, Graded)
        ]
        if len(members) < self._min_graded:
            return {}
        grade = await self._compare(task, members)
        if isinstance(grade, Ungraded):
            return {member.member: grade for member in members}
        return {member.member: _sum(member.reward, grade, index) for index, member in enumerate(members)}


def _sum(reward: Graded, grade: GroupGrade, index: int) -> Graded:
    """The member's own components and those of the comparison."""
    added = {name: values[index] for name, values in grade.components.items()}
    return replace(reward, components=reward.components | added, grader=f"{reward.grader} + {grade.grader}")


def _with_reward(trajectory: Trajectory, reward: Reward | None) -> Trajectory:
    if reward is None:
        return trajectory
    return replace(trajectory, header=replace(trajectory.header, reward=reward))
