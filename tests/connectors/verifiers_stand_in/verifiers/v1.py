"""The part of `verifiers.v1` that Fathom's player uses. Tasks are deeds of the episode, by name; no model is asked."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

NOTES = os.environ["NOTES"]
LONG_S = 1000


class RolloutError(Exception):
    pass


class TaskError(RolloutError):
    pass


@dataclass
class Task:
    key: str


@dataclass
class Trace:
    rewards: dict
    stop_condition: str = "agent_completed"
    errors: tuple = ()
    ok: bool = True


@dataclass
class Episode:
    traces: list
    errors: tuple = ()
    ok: bool = True


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    client: EvalClientConfig
    model: str
    sampling: object


class SamplingConfig:
    pass


def note(text):
    with open(NOTES, "a") as notes:
        notes.write(f"{text}\n")


def start_stray(own_session=True):
    note(f"stray {subprocess.Popen(['sleep', str(LONG_S)], start_new_session=own_session).pid}")


@dataclass
class SingleAgentEnv:
    deeds: list
    taskset: list = field(init=False)
    helper: subprocess.Popen | None = None

    def __post_init__(self):
        note("loaded")
        if self.deeds == ["is never listed"]:
            start_stray(own_session=False)
            time.sleep(LONG_S)
        if "needs the helper" in self.deeds:
            self.helper = subprocess.Popen(["sleep", str(LONG_S)])
        self.taskset = [Task(key=deed) for deed in self.deeds]

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        match task.key:
            case "dies":
                print("out of ideas", file=sys.stderr)
                start_stray()
                os._exit(3)
            case "ends the process that it was forked from":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(LONG_S)
            case "blocks":
                start_stray()
                time.sleep(LONG_S)
            case "tidies up":
                try:
                    await asyncio.sleep(LONG_S)
                finally:
                    note("tidied up")
            case "needs the helper":
                with open(f"/proc/{self.helper.pid}/stat") as stat:
                    assert stat.read().rpartition(")")[2].split()[0] not in "ZX"
            case "errs":
                error = SimpleNamespace(type="TaskError", message="no")
                return Episode([Trace({}, errors=(error,), ok=False)], ok=False)
        return Episode([Trace({"right": SimpleNamespace(value=0.5)})])


def resolve_env_config(config):
    return config


def load_environment(config):
    return SingleAgentEnv(config["taskset"]["deeds"])
