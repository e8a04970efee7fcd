"""An environment with a tool, that says how its tasks are solved: the shell of a machine that only knows `get`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fathom.config.section import Section
from fathom.core.ids import TaskId
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.message import Message
from fathom.core.records.trajectory import Graded
from fathom.envs.agents import AsyncTool, calls, says, tool_loop

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class ShellOptions(Section):
    """What the scripts get wrong."""

    tasks: int = Field(default=6, gt=0)
    """Tasks."""
    flaw: str = ""
    """`wrong`: it says another number at the end; `long`: it goes on after that; `short`: it ends before."""


class Shell:
    """`get` prints the secret; whoever says it at the end is right."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.said = ""

    async def boot(self) -> None:
        pass

    async def act(self, endpoint: Endpoint) -> None:
        tool = AsyncTool(name="bash", description="", parameters=PARAMETERS, call=self.run)
        said = await tool_loop(endpoint, [{"role": "user", "content": "say it"}], [tool], max_turns=3)
        self.said = said[-1].get("content") or ""

    async def run(self, arguments: dict[str, Any]) -> str:
        return self.secret if arguments.get("command") == "get" else "what?"

    async def grade(self, transcript: Transcript) -> Graded:
        return Graded(components={"right": float(self.said == self.secret)}, grader="shell/1", answer_found=True)

    async def close(self) -> None:
        pass


class Shells:
    """See `Shell`."""

    Options = ShellOptions

    def __init__(self, options: ShellOptions) -> None:
        self.options = options

    def tasks(self) -> tuple[Task, ...]:
        return tuple(Task(id=TaskId(f"t{n}"), messages=(), answer=str(100 + 37 * n)) for n in range(self.options.tasks))

    def eval_tasks(self) -> tuple[Task, ...]:
        return ()

    def episode(self, task: Task) -> AgentEpisode:
        return Shell(task.answer)

    def script(self, task: Task) -> tuple[Message, ...]:
        asks, tells = calls("bash", command="get"), says(task.answer)
        match self.options.flaw:
            case "wrong":
                return asks, says("7")
            case "long":
                return asks, tells, tells
            case "short":
                return (asks,)
            case _:
                return asks, tells
