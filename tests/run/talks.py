"""An environment in which an agent talks: each task says how many turns, and what goes wrong for some members."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import Field

from fathom.config.section import Section
from fathom.core.ids import TaskId
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.message import Role
from fathom.core.records.trajectory import Graded
from fathom.envs.agents import tool_loop

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class TalkOptions(Section):
    """What happens."""

    turns: int = 3
    """Answers of the model."""
    fault: str = ""
    """`boot`, `act` or `grade`, then `:` and `hang` or `die`: what the first member of each group does."""
    claims: str = ""
    """Folder where members find out who is the first. Of `fault` only."""
    tasks: int = Field(default=8, gt=0)
    """Tasks."""
    endpoints: str = ""
    """Folder in which each episode leaves its endpoint, as a JSON file. Empty: none does."""
    hopeless: int = 0
    """Tasks, the first ones, in which nothing is worth anything."""
    patient: bool = True
    """Asks again after a failure of the engine."""


class Talk:
    """The model is greeted, and asked for more, so many times. Each letter a in what it says is worth 1/10."""

    def __init__(self, options: TalkOptions, task: Task) -> None:
        self.options = options
        self.task = task

    async def boot(self) -> None:
        await self.fault("boot")

    async def act(self, endpoint: Endpoint) -> None:
        if self.options.endpoints:
            leave(endpoint, Path(self.options.endpoints))
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"hello {self.task.id}"}]
        if self.task.answer == "act:retry":
            await ask_twice(endpoint, messages)
            return
        for turn in range(self.options.turns):
            ask = tool_loop if self.options.patient else ask_once
            messages = await ask(endpoint, messages, timeout_s=30.0)
            if messages[-1]["role"] != "assistant":
                break  # no room for more
            messages.append({"role": "user", "content": f"more {turn}"})
            if turn == 0:
                await self.fault("act")

    async def grade(self, transcript: Transcript) -> Graded:
        await self.fault("grade")
        said = "".join(message.content for message in transcript.messages if message.role is Role.ASSISTANT)
        worth = 0.0 if self.task.id in hopeless_of(self.options) else 0.1 * said.count("a")
        return Graded(components={"letters": worth}, grader="talk/1", answer_found=bool(said))

    async def close(self) -> None:
        pass

    async def fault(self, phase: str) -> None:
        """What the task says, or what one member of each group is to do."""
        where, _, what = (self.task.answer or self.options.fault).partition(":")
        if where != phase or not (self.task.answer or self.is_first()):
            return
        if what == "die":
            os._exit(3)
        await asyncio.sleep(3600)

    def is_first(self) -> bool:
        """Of all that try the same task."""
        try:
            os.close(os.open(Path(self.options.claims) / self.task.id, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def hopeless_of(options: TalkOptions) -> tuple[str, ...]:
    """Ids of the tasks in which nothing is worth anything."""
    return tuple(f"t{n}" for n in range(options.hopeless))


async def ask_twice(endpoint: Endpoint, messages: list[dict[str, Any]]) -> None:
    """Give up before the answer can be there, and ask again, as official clients do."""
    body = {"model": endpoint.model, "messages": messages}
    headers = {"authorization": f"Bearer {endpoint.key}"}
    async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, verify=False) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30.0, read=0.05))
        again = await client.post(
            "/v1/chat/completions", json=body, timeout=30.0, headers={"x-stainless-retry-count": "1"}
        )
        again.raise_for_status()


async def ask_once(endpoint: Endpoint, messages: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """One answer; a failure is raised at once."""
    headers = {"authorization": f"Bearer {endpoint.key}"}
    async with httpx.AsyncClient(
        base_url=endpoint.base_url, headers=headers, timeout=timeout_s, verify=False
    ) as client:
        response = await client.post("/v1/chat/completions", json={"model": endpoint.model, "messages": messages})
    if response.status_code == 400:
        return messages  # no room for more
    return [*messages, response.raise_for_status().json()["choices"][0]["message"]]


def leave(endpoint: Endpoint, folder: Path) -> None:
    """Whole or not at all."""
    part = folder / f"{time.monotonic_ns()}-{os.getpid()}.part"
    part.write_bytes(msgspec.json.encode(endpoint))
    part.rename(part.with_suffix(".json"))


class Talks:
    """See `Talk`."""

    Options = TalkOptions

    def __init__(self, options: TalkOptions) -> None:
        self.options = options

    def tasks(self) -> tuple[Task, ...]:
        return tuple(Task(id=TaskId(f"t{n}"), messages=(), answer="") for n in range(self.options.tasks))

    def eval_tasks(self) -> tuple[Task, ...]:
        return tuple(Task(id=TaskId(f"e{n}"), messages=(), answer="") for n in range(4))

    def episode(self, task: Task) -> AgentEpisode:
        return Talk(self.options, task)
