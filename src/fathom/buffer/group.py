"""A group whose members have all ended: what each is worth, and what of it can still be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Self, final

import numpy as np

from fathom.core.ids import GroupId, Occurrence, TrajectoryId
from fathom.core.records.row import Row, rows_of
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import GroupBatch
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus

_EQUAL_REWARDS = 1e-6
"""Rewards this close, relative to the largest or absolutely, are equal: sums of components carry rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The state in which an attempt ends without being trained, and why."""

    state: AttemptState
    """Dropped, filtered or failed."""
    fate: Fate
    """Why."""
    detail: str = ""
    """For people."""


@final
@dataclass(slots=True, kw_only=True)
class FinishedGroup:
    """A group in the buffer. `rows` only ever shrinks, by `remove`; members without rows keep their rewards."""

    group: GroupId
    """Its identity."""
    occurrence: Occurrence
    """The use of the task."""
    version: int
    """Version published when it started."""
    start_deadline: int
    """Its deadline when it started (see `Clock.deadline`)."""
    finished_s: float
    """When its last member ended, seconds since the epoch."""
    graded: tuple[Trajectory, ...]
    """Members that have a reward, in member order: the support of the baseline."""
    rows: tuple[Row, ...]
    """Rows that can be trained, in member order."""
    row_deadlines: tuple[int, ...]
    """Deadline of each row."""

    @classmethod
    def of(
        cls,
        *,
        group: GroupId,
        occurrence: Occurrence,
        version: int,
        finished_s: float,
        graded: Sequence[Trajectory],
        mask_truncated: bool,
        deadline: Callable[[int, int], int],
    ) -> Self:
        """Make the rows of the graded members; none for truncated ones when `mask_truncated`."""
        rows = tuple(
            row
            for member in graded
            if not (mask_truncated and member.header.status is TrajectoryStatus.TRUNCATED)
            for row in rows_of(member)
        )
        return cls(
            group=group,
            occurrence=occurrence,
            version=version,
            start_deadline=deadline(version, version),
            finished_s=finished_s,
            graded=tuple(graded),
            rows=rows,
            row_deadlines=tuple(deadline(int(row.policy_version.min()), int(row.kv_version.min())) for row in rows),
        )

    @property
    def deadline(self) -> int:
        """Last version from which a step may train it; never earlier than what its start promised (`clock`)."""
        return max(self.start_deadline, min(self.row_deadlines, default=self.start_deadline))

    @property
    def oldest_version(self) -> int | None:
        """Oldest version of a token that can be trained. None: it has no rows."""
        return min((int(row.policy_version.min()) for row in self.rows), default=None)

    @property
    def trainable(self) -> tuple[TrajectoryId, ...]:
        """Members that have a row, in member order."""
        return tuple(dict.fromkeys(row.trajectory for row in self.rows))

    @property
    def rewards(self) -> dict[TrajectoryId, float]:
        """Reward of every graded member."""
        return {
            member.header.id: member.header.reward.total
            for member in self.graded
            if isinstance(member.header.reward, Graded)
        }

    @property
    def rewards_equal(self) -> bool:
        """True when no member's reward differs from the others': the group carries no signal."""
        rewards_G = np.array(list(self.rewards.values()))  # noqa: N806  G: graded members
        tolerance = _EQUAL_REWARDS * max(1.0, float(np.abs(rewards_G).max(initial=0.0)))
        return not len(rewards_G) or float(np.ptp(rewards_G)) <= tolerance

    def stale(self, meets: Callable[[int], bool]) -> bool:
        """True when a row cannot meet its deadline any more."""
        return not all(meets(deadline) for deadline in self.row_deadlines)

    def remove_stale(self, meets: Callable[[int], bool]) -> list[TrajectoryId]:
        """Remove the rows that cannot meet their deadline; returns the members that lost their last row by it."""
        before = self.trainable
        self._keep([meets(deadline) for deadline in self.row_deadlines])
        after = set(self.trainable)
        return [name for name in before if name not in after]

    def keep(self, is_live: Callable[[TrajectoryId], bool]) -> None:
        """Remove the rows of members that ended before the checkpoint this group comes from."""
        self._keep([is_live(row.trajectory) for row in self.rows])

    def _keep(self, kept: list[bool]) -> None:
        self.rows = tuple(compress(self.rows, kept))
        self.row_deadlines = tuple(compress(self.row_deadlines, kept))

    def to_train(self) -> GroupBatch:
        """The group as the trainer sees it."""
        truncated = (m.header.id for m in self.graded if m.header.status is TrajectoryStatus.TRUNCATED)
        return GroupBatch(group=self.group, rewards=self.rewards, truncated=frozenset(truncated), rows=self.rows)


def failure(trajectory: Trajectory, newest_version: int) -> Ending | None:
    """Why a member counts for nothing, neither in the gradient nor in the baseline. None: it is graded and sound.

    A token of a version above `newest_version`, the trainer's own, cannot be: such a record is refused.
    """
    header = trajectory.header
    versions = [version.number for version in trajectory.payload.versions]
    if versions and versions[-1] > newest_version:
        detail = f"claims version {versions[-1]}, but the trainer has made {newest_version}"
        return Ending(state=AttemptState.FAILED, fate=Fate.REFUSED, detail=detail)
    if isinstance(header.reward, Graded):
        return None
    match header.status:
        case TrajectoryStatus.ABORTED:
            fate = Fate.ABORTED
        case TrajectoryStatus.FAILED:
            fate = Fate.REFUSED if header.reward.cause == Fate.REFUSED else Fate.INFRASTRUCTURE
        case TrajectoryStatus.COMPLETED | TrajectoryStatus.TRUNCATED:
            fate = Fate.UNGRADED
    return Ending(state=AttemptState.FAILED, fate=fate, detail=f"{header.reward.cause}: {header.reward.detail}")


def without_rows(trajectory: Trajectory, mask_truncated: bool) -> Ending:
    """Why a graded member has nothing to train. Its reward stays in the baseline."""
    if not trajectory.payload.num_sampled:
        return Ending(state=AttemptState.DROPPED, fate=Fate.EMPTY)
    if mask_truncated and trajectory.header.status is TrajectoryStatus.TRUNCATED:
        return Ending(state=AttemptState.FILTERED, fate=Fate.TRUNCATED)
    return Ending(state=AttemptState.DROPPED, fate=Fate.ABANDONED, detail="no sampled token has loss")


def loss_tokens(trajectory: Trajectory) -> int:
    """Sampled tokens that have loss."""
    return sum(int(branch.loss_mask.sum()) for branch in trajectory.payload.branches)
