"""The smallest agent: it asks the model, runs the tools that the model calls, and ends when none is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import httpx

from fathom.core.errors import CutShortError
from fathom.core.ports.agent import Endpoint

_TRIES = 3
_FULL = frozenset({"context_length_exceeded", "max_turns_reached", "max_tokens_reached"})
"""Codes of refusals that end a conversation and are no fault."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTool:
    """A tool as the model is told of it, and what it does."""

    name: str
    """Its name."""
    description: str
    """What it is good for."""
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Takes the arguments and returns what the model is told. An exception is told to the model, too."""


async def tool_loop(
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[AsyncTool] = (),
    *,
    max_turns: int = 32,
    timeout_s: float = 600.0,
) -> list[dict[str, Any]]:
    """Ask until an answer calls no tool, was cut, or the session may not go on; returns the whole conversation.

    Args:
        endpoint: the model.
        messages: the conversation so far, as Chat Completions writes it.
        tools: what may be called.
        max_turns: answers at most.
        timeout_s: deadline of one answer, asked for as often as it may be.

    Raises:
        CutShortError: the turns are used up, and the last answer called a tool, which was run.
        httpx.HTTPError: the model could not be reached, or refused a call.
    """
    conversation = [dict(message) for message in messages]
    by_name = {tool.name: tool for tool in tools}
    headers = {"authorization": f"Bearer {endpoint.key}"}
    secure = endpoint.base_url.startswith("https:")  # reading certificates costs more than an answer
    async with httpx.AsyncClient(
        base_url=endpoint.base_url, headers=headers, timeout=None, trust_env=False, verify=secure
    ) as client:
        for _ in range(max_turns):
            try:
                async with asyncio.timeout(timeout_s):  # httpx would bound each part of each try
                    choice = await _ask(client, endpoint.model, conversation, tools)
            except TimeoutError as error:
                raise httpx.ReadTimeout(f"the model gave no answer within {timeout_s:g} s") from error
            if choice is None:
                return conversation
            message: dict[str, Any] = choice["message"]
            conversation.append(message)
            calls: list[dict[str, Any]] = message.get("tool_calls") or []
            if not calls or not tools or choice["finish_reason"] == "length":
                return conversation
            for call in calls:
                told = await _run(by_name, call["function"])
                conversation.append({"role": "tool", "tool_call_id": call["id"], "content": told})
    raise CutShortError(f"all {max_turns} answers (max_turns) are used up")


async def _ask(
    client: httpx.AsyncClient, model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[AsyncTool]
) -> dict[str, Any] | None:
    """One answer. None: the conversation may not go on."""
    body: dict[str, Any] = {"model": model, "messages": messages}
    if tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in tools
        ]
    response = await _post(client, body)
    if response.status_code == 400 and _code(response) in _FULL:
        return None
    if response.is_error:
        why = f"the model answered {response.status_code}: {response.text[:500]}"
        raise httpx.HTTPStatusError(why, request=response.request, response=response)
    return response.json()["choices"][0]


async def _post(client: httpx.AsyncClient, body: Mapping[str, Any]) -> httpx.Response:
    """Ask, and ask again after a fault of the line or the engine, saying so: what was sampled is not sampled again."""
    attempt = 0
    while True:
        resent = {"x-stainless-retry-count": str(attempt)}
        attempt += 1
        try:
            response = await client.post("/v1/chat/completions", json=body, headers=resent)
        except httpx.TransportError:
            if attempt == _TRIES:
                raise
            continue
        if response.status_code < 500 or attempt == _TRIES:
            return response


def _code(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _run(tools: Mapping[str, AsyncTool], function: Mapping[str, str]) -> str:
    """What a tool says. Whatever is wrong with a call is told to the model, which may do better."""
    tool = tools.get(function["name"])
    if tool is None:
        return f"error: there is no tool {function['name']!r}; there are: {', '.join(tools)}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    try:
        return await tool.call(arguments)
    except Exception as error:  # noqa: BLE001  # the model is told what its call did
        return f"error: {type(error).__name__}: {error}"
