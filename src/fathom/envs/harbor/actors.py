"""Who may act in a task's sandbox: the model with a bash tool, the task's own solution, or nobody."""

from __future__ import annotations

from typing import Any, Protocol, final

from fathom.core.ports.agent import Endpoint
from fathom.envs.agents.tool_loop import AsyncTool, tool_loop
from fathom.envs.harbor.folder import SOLUTION, HarborTask
from fathom.envs.harbor.places import Place
from fathom.envs.sandbox import Ended, Ran

BASH = "bash"
"""What the tool is called."""
BASH_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
"""Schema of the bash tool's arguments."""


class Actor(Protocol):
    """Acts in a place that was opened."""

    async def __call__(self, task: HarborTask, place: Place, endpoint: Endpoint) -> None:
        """Work on the task until it is done, or cancelled."""
        ...


@final
class BashAgent:
    """Asks the model until it calls no tool any more; its one tool runs a command in the place's shell."""

    def __init__(self, *, system: str, description: str, max_turns: int, command_timeout_s: float) -> None:
        """Remember.

        Args:
            system: system prompt. Empty: none.
            description: of the tool, for the model. May be empty.
            max_turns: answers at most.
            command_timeout_s: of one command.
        """
        self._system = system
        self._description = description
        self._max_turns = max_turns
        self._command_timeout_s = command_timeout_s

    async def __call__(self, task: HarborTask, place: Place, endpoint: Endpoint) -> None:
        """Let the model work."""

        async def bash(arguments: dict[str, Any]) -> str:
            command = arguments.get("command")
            if not isinstance(command, str):
                return "error: bash takes a text named 'command'"
            return told(await place.run(command, self._command_timeout_s))

        tool = AsyncTool(name=BASH, description=self._description, parameters=BASH_PARAMETERS, call=bash)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": task.instruction})
        await tool_loop(endpoint, messages, [tool], max_turns=self._max_turns)


async def oracle(task: HarborTask, place: Place, endpoint: Endpoint | None) -> None:
    """Do what the task's own solution does. The only one who is shown it; asks no model."""
    table = task.file
    await place.put(task.solution())
    exports = "".join(f"export {name}={_quoted(value)}; " for name, value in table.solution.env.items())
    await place.run(f"{exports}bash {SOLUTION}/solve.sh", table.agent.timeout_sec or 600.0)


async def nobody(task: HarborTask, place: Place, endpoint: Endpoint | None) -> None:
    """Do nothing."""


def told(ran: Ran) -> str:
    """What a model is told of a command: stdout, stderr, and how it ended if not well."""
    text = (ran.stdout + ran.stderr).rstrip("\n")
    if ran.exit_code == 0:
        return text
    how = f"exit code {ran.exit_code}" if ran.exit_code is not None else _LIMITS[ran.ended]
    return f"{text}\n[{how}]".lstrip("\n")


_LIMITS = {
    Ended.TIMEOUT: "killed: too slow; the shell is new",
    Ended.MEMORY: "killed: too much memory; the shell is new",
    Ended.OUTPUT: "killed: too much output; the shell is new",
}


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
