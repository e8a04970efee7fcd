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
    """What agents may ask for, and where. A session's context has at most `rollout.max_prompt_tokens +
    rollout.max_new_tokens` tokens, each answer at most `rollout.max_new_tokens`."""

    max_turns: int = Field(default=32, gt=0)
    """Answers of the model in a trajectory at most."""
    max_sampled_tokens: int | None = Field(default=None, gt=0)
    """Sampled tokens of a trajectory at most. None: what the turns allow."""
    host: str = "127.0.0.1"
    """Interface that the session server listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port. 0: any free one."""
    ignored_parameters: tuple[str, ...] = ()
    """Parameters of requests that are left out though they would change the answer, e.g. `temperature` of an agent that
    always sends one. Empty: what cannot be honoured is refused."""
    max_kept_tokens: int = Field(default=2**27, gt=0)
    """Tokens that all sessions keep together; beyond them a trajectory fails before it starts."""
