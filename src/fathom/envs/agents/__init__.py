"""Episodes in which an agent acts, each in a process of its own; and what agents are made of."""

from fathom.envs.agents.command import AgentExitError, CommandAgent
from fathom.envs.agents.processes import AgentProcesses
from fathom.envs.agents.script import calls, says
from fathom.envs.agents.tool_loop import AsyncTool, tool_loop

__all__ = ["AgentExitError", "AgentProcesses", "AsyncTool", "CommandAgent", "calls", "says", "tool_loop"]
