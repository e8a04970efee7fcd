"""Questions that a model answers with the help of an MCP server's tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import final

from pydantic import Field

from fathom.config.section import Section
from fathom.core.errors import UngradedError
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.message import Role
from fathom.core.records.trajectory import Graded
from fathom.envs.agents.tool_loop import tool_loop
from fathom.envs.mcp.server import ToolServer, ToolServerOptions, ToolServers
from fathom.envs.rows import Rows, RowsOptions


class McpOptions(Section):
    """The questions, the server, and how long a model may work on one."""

    rows: RowsOptions
    """Questions and what a final answer is worth, as in `task.kind = "rows"`."""
    server: ToolServerOptions
    """The server. Each episode starts one of its own."""
    max_turns: int = Field(default=16, gt=0)
    """Answers of the model in one episode, at most."""
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """Of one answer of the model."""


@final
class McpEnvironment:
    """An `AgentEnvironment`: the model is asked a row's question and offered the server's tools.

    Its last message, if it calls no tool, is graded as the answer to the row. A server that was lost on the way means
    *ungraded*, cause `tool_server_died`.
    """

    def __init__(self, options: McpOptions) -> None:
        """Read the rows.

        Raises:
            DataError: unusable rows. MissingDependencyError: the package `mcp` is not installed.
        """
        self._options = options
        self._rows = Rows(options.rows)
        self._servers = ToolServers(options.server)

    def tasks(self) -> Sequence[Task]:
        """Training rows."""
        return self._rows.tasks()

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out rows."""
        return self._rows.eval_tasks()

    def episode(self, task: Task) -> AgentEpisode:
        """A new attempt."""
        return _Episode(self._options, self._rows, self._servers, task)


@final
class _Episode:
    """An `AgentEpisode`."""

    def __init__(self, options: McpOptions, rows: Rows, servers: ToolServers, task: Task) -> None:
        self._options = options
        self._rows = rows
        self._servers = servers
        self._task = task
        self._server: ToolServer | None = None

    async def boot(self) -> None:
        self._server = await self._servers.start(self._task.id)

    async def act(self, endpoint: Endpoint) -> None:
        assert self._server is not None, "booted"
        await tool_loop(
            endpoint,
            self._task.messages,
            self._server.tools,
            max_turns=self._options.max_turns,
            timeout_s=self._options.answer_timeout_s,
        )

    async def grade(self, transcript: Transcript) -> Graded:
        if self._server is not None and self._server.lost:
            raise UngradedError("tool_server_died", self._server.lost)
        last = transcript.messages[-1:]
        answered = bool(last) and last[0].role is Role.ASSISTANT and not last[0].tool_calls
        said = last[0].content if answered else ""
        return await asyncio.to_thread(self._rows.grade, self._task, said)  # a judge is asked in a loop of its own

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
