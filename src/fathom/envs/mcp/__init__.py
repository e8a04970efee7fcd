"""Tools from MCP servers, each started as a program for one episode."""

from fathom.envs.mcp.server import ToolServer, ToolServerError, ToolServerOptions, ToolServers

__all__ = ["ToolServer", "ToolServerError", "ToolServerOptions", "ToolServers"]
