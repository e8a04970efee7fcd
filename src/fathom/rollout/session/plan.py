"""What a session is for, and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.core.ids import PolicyVersion
from fathom.core.records.message import Message
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.core.records.trajectory import TokenPayload, TrajectoryStatus
from fathom.rollout.session.matching import Strictness


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What a session is for, and what it may use."""

    name: str
    """Identity: the trajectory's."""
    sampling: SamplingParams
    """The distribution of calls that name none."""
    max_new_tokens: int
    """Sampled tokens of one turn at most."""
    max_context_tokens: int
    """Tokens of a context at most, what is sampled included."""
    max_turns: int
    """Turns at most."""
    stop_ids: tuple[int, ...]
    """Ids that end a turn."""
    seed: int
    """Fixes its random numbers, by turn."""
    priority: int
    """Smaller is served first."""
    purpose: Purpose
    """Rollout or evaluation."""
    max_sampled_tokens: int | None = None
    """Sampled tokens of all turns at most; turns that run at once may exceed it together. None: no bound of its own."""
    pinned: PolicyVersion | None = None
    """Answer by exactly this version. None: whichever serves."""
    want_routes: bool = False
    """Record expert routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What a session leaves."""

    payload: TokenPayload | None
    """Its tokens. None: nothing was asked of the model."""
    status: TrajectoryStatus
    """How it ended, by the finish reason of the last turn and what was refused since."""
    cause: str
    """Why it was not completed. Empty: it was."""
    matched: dict[Strictness, int]
    """Calls that went on from a known history, by how that was found."""
    rendered_whole: int
    """Calls whose context had to be rendered as a whole though their history was known."""
    messages: tuple[Message, ...]
    """The conversation that ended last."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """Of all turns, in the order in which they ended."""
