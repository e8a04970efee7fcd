"""Identities: what a token, a trajectory and a version are called everywhere."""

from __future__ import annotations

from typing import NewType

import msgspec

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
EngineId = NewType("EngineId", str)


class Occurrence(msgspec.Struct, frozen=True, order=True, tag="occurrence.1"):
    """One use of a task: the `index`-th place in the order of epoch `epoch`."""

    epoch: int
    """Pass over the task set, from 0."""
    index: int
    """Place in that epoch's order, from 0."""

    @property
    def name(self) -> str:
        """Short text form, e.g. `e0.i17`."""
        return f"e{self.epoch}.i{self.index}"


class PolicyVersion(msgspec.Struct, frozen=True, tag="policy_version.1"):
    """A version of the weights: number of optimizer steps behind them, in which incarnation, with which digest."""

    incarnation: int
    """Incarnation of the run that made it, from 1; resuming opens a new one."""
    number: int
    """Optimizer steps taken, from 0 (the weights RL starts from)."""
    digest: str
    """Root digest (hex) of the published tensors, after the cast to the served dtype."""

    @property
    def name(self) -> str:
        """Short text form, e.g. `v12@1`."""
        return f"v{self.number}@{self.incarnation}"

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the run's versions: a later incarnation is newer, whatever its numbers."""
        return self.incarnation, self.number


def group_id(occurrence: Occurrence, attempt: int, incarnation: int) -> GroupId:
    """Identity of the group that makes `attempt` (from 0) at an occurrence; unique over incarnations."""
    return GroupId(f"{incarnation}/{occurrence.name}/a{attempt}")


def trajectory_id(group: GroupId, member: int) -> TrajectoryId:
    """Identity of the `member`-th trajectory (from 0) of a group."""
    return TrajectoryId(f"{group}/m{member}")
