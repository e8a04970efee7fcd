"""Fathom: asynchronous reinforcement learning for language models, with every token accounted for."""

from fathom.config.run import RunConfig
from fathom.core.ports.environment import Environment, Task
from fathom.core.records.trajectory import Graded
from fathom.run.adapters.run import AdaptersRun
from fathom.run.run import Run, RunResult

__all__ = ["AdaptersRun", "Environment", "Graded", "Run", "RunConfig", "RunResult", "Task"]
