"""An environment whose tasks say what goes wrong, e.g. `boot:hang`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded
from fathom.envs.agents import CommandAgent


def task(*deeds: str) -> Task:
    return Task(id=" ".join(deeds) or "none", messages=(), answer="")


def reward(value: float) -> Graded:
    return Graded(components={"total": value}, grader="deeds/1", answer_found=True)


async def _hang() -> None:
    await asyncio.sleep(3600)


async def _resist() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def _block() -> None:
    time.sleep(3600)


async def _spin() -> None:
    while True:
        pass


async def _resist_all() -> None:
    while True:
        try:
            time.sleep(3600)
        except BaseException:  # noqa: BLE001
            continue


async def _die() -> None:
    os._exit(7)


async def _raise() -> None:
    raise ValueError("as asked")


async def _exit() -> None:
    sys.exit(3)


async def _leave_behind() -> None:
    """Processes in the group, in a session of their own, and such whose parent is gone."""
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 3600 & setsid sh -c 'sleep 3600 & sleep 3600' &"], check=True)


DEEDS = {
    "hang": _hang,
    "resist": _resist,
    "block": _block,
    "spin": _spin,
    "resist_all": _resist_all,
    "die": _die,
    "raise": _raise,
    "exit": _exit,
    "leave": _leave_behind,
}


class Episode:
    def __init__(self, of: Task) -> None:
        self.deeds = dict(deed.split(":") for deed in of.id.split() if ":" in deed)
        self.said: list[str] = []

    async def do(self, phase: str) -> None:
        self.said.append(phase)
        if phase in self.deeds:
            await DEEDS[self.deeds[phase]]()

    async def boot(self) -> None:
        await self.do("boot")

    async def act(self, endpoint) -> None:
        await self.do("act")

    async def grade(self, transcript) -> Graded:
        await self.do("grade")
        if "reward" in self.deeds:
            return float("nan")  # type: ignore[return-value]
        return reward(float(len(transcript.messages)))

    async def close(self) -> None:
        await self.do("close")


class Deeds:
    def tasks(self):
        return (task(),)

    def eval_tasks(self):
        return ()

    def episode(self, of: Task) -> Episode:
        if of.id == "make:raise":
            raise ValueError("as asked")
        return Episode(of)


class CommandEpisode(Episode):
    """Runs the task's answer in a shell."""

    def __init__(self, of: Task) -> None:
        super().__init__(of)
        self.agent = CommandAgent(["sh", "-c", of.answer, "sh", "{model}"], variables={"MINE": "yes"})

    async def act(self, endpoint) -> None:
        await self.agent.act(endpoint)


class Commands(Deeds):
    def episode(self, of: Task) -> Episode:
        return CommandEpisode(of)


async def _play_for_ever() -> None:
    """Print the process ids below this one while an episode runs that has started others, then hang."""
    from test_agent_processes import ENDPOINT, Told, processes_below

    from fathom.config.agent import LimitsConfig
    from fathom.envs.agents import AgentProcesses

    async with AgentProcesses(Deeds(), LimitsConfig()) as processes:
        playing = asyncio.create_task(processes.play(task("boot:leave", "act:hang"), ENDPOINT, Told()))
        while len(found := processes_below(os.getpid())) < 3 + 5:
            await asyncio.sleep(0.05)
        print(*found, flush=True)
        await playing


if __name__ == "__main__":
    asyncio.run(_play_for_ever())
