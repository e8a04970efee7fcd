"""verifiers as a program. Its pins (`mcp`, `openai`) are not ours, so it runs in a Python environment of its own.

In that environment runs `player.py`, which is asked and answers in lines of JSON. Loading verifiers takes
seconds, so it is loaded once, and a player is forked for each episode.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import tempfile
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
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                _command(python),
                env=_environment(python, variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"task.options.python: {python} cannot be started: {error}; make one: {INSTALL}"
            ) from error
        order = msgspec.json.encode({"do": "tasks", "env": env, "most": most}) + b"\n"
        with process:
            try:
                answer, _ = process.communicate(order, timeout_s)
            except subprocess.TimeoutExpired as error:
                raise ConfigError(
                    f"the tasks were not listed within {timeout_s:g} s; raise task.options.load_timeout_s. It wrote: "
                    f"{_tail(printed)}"
                ) from error
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        wrote = _tail(printed)
    if process.returncode != 0:
        if "No module named 'verifiers" in wrote:
            raise ConfigError(f"task.options.python: {python} has no verifiers; make an environment: {INSTALL}")
        raise ConfigError(f"verifiers refuses the taskset or its options; it wrote: {wrote}")
    listed = msgspec.json.decode(answer, type=Listed)
    if listed.version != VERSION:
        raise ConfigError(
            f"task.options.python: {python} has verifiers {listed.version}, and {VERSION} is needed; make an "
            f"environment: {INSTALL}"
        )
    return listed


@final
class Players:
    """verifiers with a taskset, loaded once in a process from which a player is forked for each episode.

    It is started by `start`, or by the first episode that finds none: one whose process has died starts another.
    """

    def __init__(self, python: str, variables: Mapping[str, str], env: Mapping[str, Any], most: int) -> None:
        """Nothing starts yet. `most`: tasks that are loaded."""
        self._python = python
        self._variables = variables
        self._env = env
        self._most = most
        self._door: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    @property
    def wrote(self) -> str:
        """The last that it wrote while it was loaded."""
        return _tail(self._printed) if self._printed is not None else ""

    def start(self) -> None:
        """Start, and do not wait. The process ends with the one that starts it.

        Raises:
            PlayerError: the interpreter cannot be started.
        """
        self._door, theirs = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # read as long as this lives
        order = {"do": "play", "env": self._env, "most": self._most, "parent": os.getpid(), "door": theirs.fileno()}
        with theirs, tempfile.TemporaryFile() as asked:
            asked.write(msgspec.json.encode(order) + b"\n")
            asked.seek(0)
            try:
                self._process = subprocess.Popen(
                    _command(self._python),
                    env=_environment(self._python, self._variables),
                    stdin=asked,
                    stdout=subprocess.DEVNULL,
                    stderr=self._printed,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise PlayerError(f"{self._python} cannot be started: {error}") from error

    def order(self, line: socket.socket, printed: IO[bytes], receipt: socket.socket) -> None:
        """A player that is asked on `line`, prints into a file, and is gone when `receipt` is closed. As `start`."""
        for _ in range(2):
            if self._door is not None:
                with suppress(OSError):
                    socket.send_fds(self._door, [b"."], [line.fileno(), printed.fileno(), receipt.fileno()])
                    return
            self.start()
        raise PlayerError(f"verifiers ended as soon as it was started; it wrote: {self.wrote or 'nothing'}")


@final
class Player:
    """The process of one episode."""

    def __init__(
        self,
        players: Players,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        printed: IO[bytes],
        receipt: socket.socket,
    ) -> None:
        """Use `start`."""
        self._players = players
        self._reader = reader
        self._writer = writer
        self._printed = printed
        self._receipt = receipt

    @classmethod
    async def start(cls, players: Players, position: int, key: str) -> Player:
        """Have it forked and wait until the task is there. Cancelled, it is ended.

        Raises:
            PlayerError: it has no such task, or fails.
        """
        line, its_line = socket.socketpair()
        receipt, its_receipt = socket.socketpair()
        receipt.setblocking(False)
        printed = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the player
        try:
            with its_line, its_receipt:
                players.order(its_line, printed, its_receipt)
            reader, writer = await asyncio.open_unix_connection(sock=line, limit=_LINE_BYTES)
            player = cls(players, reader, writer, printed, receipt)
        except BaseException:
            for opened in (line, receipt, printed):
                opened.close()
            raise
        try:
            memory = resource.getrlimit(resource.RLIMIT_DATA)
            await player._ask({"position": position, "key": key, "memory": memory})
        except BaseException:
            await player.close()
            raise
        return player

    async def play(self, base_url: str, key: str, model: str) -> Finished:
        """Play the task to its end and have it scored. Raises PlayerError: the program ended before."""
        return msgspec.json.decode(await self._ask({"base_url": base_url, "key": key, "model": model}), type=Finished)

    async def close(self) -> None:
        """End it: it is asked to take down what it started, then killed. Safe to call twice."""
        if self._printed.closed:
            return
        with suppress(OSError):
            self._writer.write_eof()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone(), _TIDY_S)
        self._writer.close()
        await self._gone()
        self._receipt.close()
        self._printed.close()

    async def _gone(self) -> None:
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_recv(self._receipt, 1)

    async def _ask(self, request: Mapping[str, Any]) -> bytes:
        with suppress(ConnectionError):
            self._writer.write(msgspec.json.encode(request) + b"\n")
            await self._writer.drain()
        line = b""
        with suppress(ConnectionError):
            line = await self._reader.readline()
        if not line:
            wrote = _tail(self._printed) or self._players.wrote or "nothing"
            raise PlayerError(f"verifiers ended; it wrote: {wrote}")
        return line


def _tail(printed: IO[bytes]) -> str:
    size = os.fstat(printed.fileno()).st_size
    return os.pread(printed.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


def _command(python: str) -> list[str]:
    return [python, "-P", str(_PLAYER)]  # -P: its folder is no place to import from


def _environment(python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """None of the run's secrets. `uv`, with which verifiers prepares its harnesses, lies beside the interpreter."""
    found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    folder = str(Path(python).absolute().parent)
    return found | {"PATH": f"{folder}{os.pathsep}{found.get('PATH', os.defpath)}"} | dict(variables)
