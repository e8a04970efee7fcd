"""verifiers as a program. Its pins (`mcp`, `openai`) are not ours, so it runs in a Python environment of its own.

In that environment runs `player.py`, which is asked and answers in lines of JSON.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, final

import msgspec

from fathom.core.errors import ConfigError

VERSION = "0.4.0"
"""The release that the player was written for."""
INSTALL = f"python3 -m venv verifiers-env && verifiers-env/bin/pip install verifiers=={VERSION} uv"
"""How to make an environment that holds it."""

_PLAYER = Path(__file__).with_name("player.py")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "SSL_CERT_FILE")
_LINE_BYTES = 1 << 20
_TAIL_BYTES = 2000
_TIDY_S = 5.0


class PlayerError(Exception):
    """The program ended without an answer; the message holds the last that it wrote."""


class Listed(msgspec.Struct, frozen=True):
    """What a taskset has."""

    version: str
    """Of verifiers."""
    keys: tuple[str, ...]
    """Identities of its tasks, in its order."""


class Finished(msgspec.Struct, frozen=True):
    """How verifiers says that an episode went."""

    rewards: dict[str, float | None]
    """Weighted, by name. None: it was not given, or is not finite."""
    stopped: str
    """Its stop condition. Empty: the taskset or the agent was done."""
    failed: str
    """Kind of what went wrong, by where: `task_error`, `harness_error`, `provider_error`, ... Empty: nothing."""
    errors: tuple[str, ...]
    """All that went wrong, as it says it."""


def list_tasks(
    python: str, variables: Mapping[str, str], env: Mapping[str, Any], most: int, timeout_s: float
) -> Listed:
    """The tasks of a taskset.

    Raises:
        ConfigError: there is no verifiers, or it refuses the taskset or its options.
    """
    request = msgspec.json.encode({"do": "tasks", "env": env, "most": most}) + b"\n"
    try:
        done = subprocess.run(
            _command(python), input=request, env=_environment(python, variables), capture_output=True, timeout=timeout_s
        )
    except OSError as error:
        raise ConfigError(f"task.options.python: {python} cannot be started: {error}; make one: {INSTALL}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the tasks were not listed within {timeout_s:g} s (task.options.load_timeout_s)") from error
    if done.returncode != 0:
        wrote = done.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
        if "No module named 'verifiers" in wrote:
            raise ConfigError(f"task.options.python: {python} has no verifiers; make an environment: {INSTALL}")
        raise ConfigError(f"verifiers refuses the taskset or its options; it wrote: {wrote}")
    listed = msgspec.json.decode(done.stdout, type=Listed)
    if listed.version != VERSION:
        raise ConfigError(
            f"task.options.python: {python} has verifiers {listed.version}, and {VERSION} is needed; make an "
            f"environment: {INSTALL}"
        )
    return listed


@final
class Player:
    """The program of one episode."""

    def __init__(self, process: Process, wrote: IO[bytes]) -> None:
        """Use `start`."""
        self._process = process
        self._wrote = wrote

    @classmethod
    async def start(
        cls, python: str, variables: Mapping[str, str], env: Mapping[str, Any], position: int, key: str
    ) -> Player:
        """Start it and wait until the task is loaded. Cancelled, it is ended.

        Raises:
            PlayerError: it has no such task, or fails.
        """
        wrote = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the player
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(python),
                env=_environment(python, variables),
                stdin=PIPE,
                stdout=PIPE,
                stderr=wrote,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            wrote.close()
            raise PlayerError(f"{python} cannot be started: {error}") from error
        player = cls(process, wrote)
        try:
            await player._ask({"do": "play", "env": env, "position": position, "key": key})
        except BaseException:
            await player.close()
            raise
        return player

    async def play(self, base_url: str, key: str, model: str) -> Finished:
        """Play the task to its end and have it scored. Raises PlayerError: the program ended before."""
        return msgspec.json.decode(await self._ask({"base_url": base_url, "key": key, "model": model}), type=Finished)

    async def close(self) -> None:
        """End it: it is asked to take down what it started, then killed. Safe to call twice."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _TIDY_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._wrote.close()

    async def _ask(self, request: Mapping[str, Any]) -> bytes:
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        with suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise PlayerError(f"verifiers ended with code {code}; it wrote: {self._tail()}")
        return line

    def _tail(self) -> str:
        size = self._wrote.seek(0, os.SEEK_END)
        text = os.pread(self._wrote.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        return text or "nothing"


def _command(python: str) -> list[str]:
    return [python, "-P", str(_PLAYER)]  # -P: its folder is no place to import from


def _environment(python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """None of the run's secrets. `uv`, with which verifiers prepares its harnesses, lies beside the interpreter."""
    found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    folder = str(Path(python).absolute().parent)
    return found | {"PATH": f"{folder}{os.pathsep}{found.get('PATH', os.defpath)}"} | dict(variables)
