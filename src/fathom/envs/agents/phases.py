"""What the run and an episode's process say to each other: do this phase; it ended so."""

from __future__ import annotations

import msgspec

from fathom.core.ports.agent import Acting, Endpoint, Transcript
from fathom.core.ports.environment import GroupGrade, GroupMember, Task
from fathom.core.records.trajectory import Graded


class PhaseTime(msgspec.Struct, frozen=True, tag="phase_time.1"):
    """How long a phase may take, and what it takes to end it."""

    limit_s: float
    """Seconds after which it is cancelled."""
    grace_s: float
    """Seconds for it to end then. After as many again it is interrupted, after as many again its process is killed."""

    @property
    def killed_s(self) -> float:
        """Seconds after which nobody waits any more."""
        return self.limit_s + 3 * self.grace_s


class Boot(msgspec.Struct, frozen=True, tag="boot.1"):
    """Make the episode and boot it."""

    time: PhaseTime
    """Its time."""
    task: Task
    """The task."""


class Act(msgspec.Struct, frozen=True, tag="act.1"):
    """Let the agent work."""

    time: PhaseTime
    """Its time."""
    endpoint: Endpoint
    """Its model."""


class Grade(msgspec.Struct, frozen=True, tag="grade.1"):
    """Judge what it left."""

    time: PhaseTime
    """Its time."""
    transcript: Transcript
    """What happened."""


class Close(msgspec.Struct, frozen=True, tag="close.1"):
    """Leave nothing behind."""

    time: PhaseTime
    """Its time."""


class Compare(msgspec.Struct, frozen=True, tag="compare.1"):
    """Compare the members of a group. Asked of a process that plays no episode."""

    time: PhaseTime
    """Its time."""
    task: Task
    """The task."""
    members: tuple[GroupMember, ...]
    """Graded members."""


Phase = Boot | Act | Grade | Close | Compare
Given = Graded | GroupGrade
"""What a phase may give."""


class PhaseEnded(msgspec.Struct, frozen=True, tag="phase_ended.1"):
    """A phase is over."""

    how: Acting
    """How it ended."""
    detail: str
    """Why, for people. Empty: it returned."""
    given: Given | None
    """The reward, or what a comparison adds. None: the phase gives none, or did not end well."""
    cause: str = ""
    """The cause that a grader named for there being no reward. Empty: it named none."""
