"""A small MCP server with numbers in it: a real peer, written with the official SDK."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
kept: dict[str, int] = {}


@server.tool()
def keep(name: str, number: int) -> str:
    """Keep a number under a name."""
    kept[name] = number
    return f"{name} is {number}"


@server.tool(name="sum.of")
def sum_of(names: list[str]) -> int:
    """Add kept numbers up."""
    return sum(kept[name] for name in names)


@server.tool()
def wait(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def whoami() -> str:
    """What the server was told."""
    return f"{sys.argv[1:]} {os.environ.get('TASK', '')} {os.environ.get('SECRET', 'no secret')}"


@server.tool()
def much(chars: int) -> str:
    """A long text."""
    return "a" * chars + "z"


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("cannot start today")
    server.run()
