"""Who plays and grades: processes that are started before anything heavy is loaded."""

from __future__ import annotations

from fathom.config.agent import LimitsConfig
from fathom.core.ports.agent import AgentEnvironment
from fathom.envs.agents.processes import AgentProcesses
from fathom.envs.grading.grader import Grader
from fathom.run.resolve import Resolved

Players = Grader | AgentProcesses
"""Graders of single-turn answers, or episodes in which an agent acts."""


def players_for(resolved: Resolved) -> Players:
    """Those of a run; nothing starts yet."""
    task = resolved.config.task
    if isinstance(resolved.environment, AgentEnvironment):
        return AgentProcesses(resolved.environment, task.limits or LimitsConfig())
    return Grader(resolved.environment, workers=task.grader_workers, timeout_s=task.grade_timeout_s)
