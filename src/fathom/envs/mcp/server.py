"""An MCP server as a program of one episode: started, asked for its tools, called, ended.

The connection lives in a task of its own, because the SDK wants it closed by the task that opened it, and the phases of
an episode are different tasks.

open ──> [task: start the program, list tools ──> wait ──> end the program] ──> close
                                             └── call, call, ...
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, final

import msgspec
from pydantic import Field

from fathom.config.section import Section
from fathom.core.errors import MissingDependencyError
from fathom.core.ids import TaskId
from fathom.envs.agents.tool_loop import AsyncTool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_NAME_CHARS = 64
_TAIL_BYTES = 2000


class ToolServerOptions(Section):
    """How the server is started, and which of its tools are offered."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, spoken to over its stdin and stdout. `{task}` is replaced by the task's id."""
    folder: str | None = None
    """Where it is started. None: the run's working directory."""
    variables: dict[str, str] = Field(default={})
    """Variables of its environment beside `PATH`, `HOME` and the user's name; of the run's own it gets no other.
    `{task}` is replaced here, too."""
    tools: tuple[str, ...] = ()
    """Tools to offer, by the server's names. Empty: all."""
    call_timeout_s: float = Field(default=30.0, gt=0)
    """Of one call; the model is told when it is over."""
    output_chars: int = Field(default=8000, gt=1)
    """Longest result that the model is told: more is cut in the middle."""


class ToolServerError(Exception):
    """The server cannot be used; the message holds the last that it wrote to stderr."""


@final
class ToolServers:
    """Starts servers, one for each episode. May be an attribute of an environment: it is picklable.

    The SDK is loaded where this is made and where it is unpickled, so that no episode waits for it.
    """

    def __init__(self, options: ToolServerOptions) -> None:
        """Nothing starts yet. Raises MissingDependencyError: the package `mcp` is not installed."""
        _load_sdk()
        self._options = options

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        _load_sdk()

    async def start(self, task: TaskId) -> ToolServer:
        """Start one. Raises ToolServerError: it did not start, or does not offer what is asked for."""
        server = ToolServer(self._options, task)
        await server.open()
        return server


@final
class ToolServer:
    """A server that runs for one episode. `tools` can be handed to `tool_loop`.

    server = await ToolServers(ToolServerOptions(command=("my-server",))).start(task.id)
    await tool_loop(endpoint, messages, server.tools)
    await server.close()
    """

    def __init__(self, options: ToolServerOptions, task: TaskId) -> None:
        """Nothing starts yet; see `ToolServers`."""
        self._options = options
        self._task_id = task
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self.tools: tuple[AsyncTool, ...] = ()
        """What the model may call."""
        self.lost = ""
        """Why the server is gone though nobody closed it. Empty: it is not, as far as is known. What an agent did
        with a server that was lost is no measure of the agent."""

    async def open(self) -> None:
        """Start the program and list its tools. Cancelled, it ends the program.

        Raises:
            ToolServerError: it cannot be started, says no MCP, or lacks a tool that was asked for.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(ready))
        try:
            await ready
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the program, and wait until it is gone: its stdin is closed, then it is killed. Safe to call twice."""
        self._closing.set()
        if self._holding is not None:
            if self._client is None:  # still starting
                self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        """Be connected until it is closed."""
        from mcp import Client, stdio_client

        with tempfile.TemporaryFile("w+") as errors:
            try:
                async with Client(stdio_client(self._program(), errlog=errors)) as client:
                    self.tools = tuple(_offer(self, tool) for tool in self._chosen(await _list(client)))
                    self._client = client
                    if not ready.done():
                        ready.set_result(None)
                    await self._closing.wait()
            except Exception as error:  # noqa: BLE001  # the boundary to a program and its protocol
                detail = f"{self._options.command[0]}: {_reason(error)}; it wrote: {_tail(errors)}"
                if not ready.done():
                    ready.set_exception(ToolServerError(detail))
                elif not self._closing.is_set():
                    self.lost = detail
            finally:
                self._client = None

    def _program(self) -> Any:
        from mcp import StdioServerParameters

        def fill(text: str) -> str:
            return text.replace("{task}", self._task_id)

        program, *arguments = map(fill, self._options.command)
        variables = {name: fill(value) for name, value in self._options.variables.items()}
        return StdioServerParameters(command=program, args=arguments, env=variables, cwd=self._options.folder)

    def _chosen(self, tools: list[Tool]) -> list[Tool]:
        wanted = self._options.tools or tuple(tool.name for tool in tools)
        by_name = {tool.name: tool for tool in tools}
        if missing := [name for name in wanted if name not in by_name]:
            raise ToolServerError(f"it has no tool {', '.join(missing)}; it has {', '.join(by_name) or 'none'}")
        offered = [_offered_name(name) for name in wanted]
        if len(set(offered)) < len(offered):
            raise ToolServerError(f"two of its tools would be offered under one name: {', '.join(sorted(offered))}")
        return [by_name[name] for name in wanted]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool by the server's own name; returns what the model is told.

        Raises:
            ToolServerError: the server is gone, which `lost` says from now on. MCPError: the call failed, or its time
            was over. `tool_loop` tells the model of either.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = self._client
        if client is None:
            raise ToolServerError(self.lost or "the server is closed")
        try:
            result = await client.call_tool(name, arguments, self._options.call_timeout_s)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            self.lost = f"{self._options.command[0]} ended while {name} was called"
            raise ToolServerError(self.lost) from error
        return _cut(_told(result), self._options.output_chars)


def _offer(server: ToolServer, tool: Tool) -> AsyncTool:
    async def call(arguments: dict[str, Any]) -> str:
        return await server.call(tool.name, arguments)

    return AsyncTool(
        name=_offered_name(tool.name),
        description=tool.description or tool.title or "",
        parameters=tool.input_schema,
        call=call,
    )


def _offered_name(name: str) -> str:
    """A name as providers of models allow it."""
    return _NOT_IN_NAMES.sub("_", name)[:_NAME_CHARS]


async def _list(client: Client) -> list[Tool]:
    """All pages."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _told(result: CallToolResult) -> str:
    """The text of a result; what is no text is named. An error says so first."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out ...]\n{text[-half:]}"


def _reason(error: BaseException) -> str:
    """The innermost: groups of one task say nothing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ToolServerError) else f"{type(error).__name__}: {error}"


def _tail(errors: IO[str]) -> str:
    with suppress(OSError, ValueError):
        descriptor = errors.fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        return text or "nothing"
    return "nothing"


def _load_sdk() -> None:
    try:
        import mcp as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError("a tool server", "mcp", "mcp") from error
