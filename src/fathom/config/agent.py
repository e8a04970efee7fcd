"""Agents: what an episode may use."""

from __future__ import annotations

from pydantic import Field

from fathom.config.section import Section


class LimitsConfig(Section):
    """Seconds of each phase of an agent's episode. A phase whose time is over is cancelled, then killed."""

    boot_s: float = Field(default=60.0, gt=0)
    """Until the world is ready; more is *ungraded*, `boot_timeout`."""
    agent_s: float = Field(default=600.0, gt=0)
    """Of the agent's work; what it left then is graded, and the trajectory is truncated."""
    grade_s: float = Field(default=60.0, gt=0)
    """Of grading; more is *ungraded*, `grader_timeout`."""
    close_s: float = Field(default=10.0, gt=0)
    """Of tidying up; afterwards the process is killed with all it started."""
    grace_s: float = Field(default=2.0, gt=0)
    """For a phase to end once it was cancelled. After as many seconds again it is interrupted, after as many again its
    process is killed."""


class AgentConfig(Section):
    """What the session of a trajectory may use."""

    max_turns: int = Field(default=32, gt=0)
    """Answers of the model in a trajectory at most."""
    max_context_tokens: int = Field(gt=1)
    """Tokens of a context at most, the answer included; the engines' contexts are this long."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Sampled tokens of a trajectory at most. None: what the turns allow."""
    host: str = "127.0.0.1"
    """Interface that the session server listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port. 0: any free one."""
