"""A sandbox, seen from outside.

    this process ──bwrap──> process 1 of the sandbox (`inside.py`) ──fork──> bash ──> what the model asked for
         └────────────── one socket: requests, answers ──┘

Nothing of it lies on the host's disk: its folders are in memory and vanish with it. When the socket closes, process 1
ends; with it the kernel ends every process of the sandbox. When this process dies, so does process 1.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import msgspec

from fathom.core.errors import SandboxError
from fathom.envs.sandbox.inside import FRAME
from fathom.envs.sandbox.seccomp import filter_program
from fathom.envs.sandbox.spec import Ended, Limits, PlacedFile, Ran, SandboxSpec
from fathom.envs.sandbox.view import ETC_FILES, NOBODY, PYTHON, bwrap_command, require_tools

MAX_COMMAND_BYTES = 256 * 1024
"""Longest command."""
MAX_TRANSFER_BYTES = 64 << 20
"""Most that one `put` or `get` moves."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FIRST_ENDED = "its first process ended"
_GRACE_S = 20.0
_CLOSE_S = 2.0
_INSIDE = Path(__file__).with_name("inside.py")


class _Answer(msgspec.Struct):
    """What process 1 says. Judged like anything from inside: by its form."""

    number: int
    error: str | None = None
    errno: int = 0
    exit_code: int | None = None
    ended: Ended = Ended.EXITED
    stdout_bytes: int = 0
    left_out_bytes: int = 0


_decode = msgspec.json.Decoder(_Answer).decode


@final
class Sandbox:
    """A shell in a world of its own. `async with Sandbox(spec) as sandbox:`, or `open` and `close`.

    Commands follow each other in one bash: folder and variables live on; what was started in the background lives on
    too, until `begin_phase` or `close`. A call that is cancelled ends what it had started; the sandbox can be used on.
    The thread that opens a sandbox must live as long as it: the kernel ends the sandbox with that thread.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        """Nothing starts yet."""
        self._spec = spec
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[_Answer, bytes] | None]] = {}
        self._gone = "it is not open"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Make the sandbox.

        Raises:
            ConfigError: a program it needs is missing. SandboxError: it could not be made, or not in time.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._process = await self._spawn(require_tools(), theirs.fileno())
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._gone = ""
        hello = asyncio.get_running_loop().create_future()
        self._waiting[0] = hello
        self._reading = asyncio.create_task(self._read(reader))
        try:
            async with asyncio.timeout(self._spec.boot_timeout_s):
                await hello
                await self.begin_phase(self._spec.limits)
        except (TimeoutError, SandboxError) as error:
            reason = await self._last_words()
            await self.close()
            raise SandboxError(
                f"bubblewrap could not make a sandbox within {self._spec.boot_timeout_s:g} s: {reason or error}. "
                "The kernel must allow user namespaces (sysctl user.max_user_namespaces)"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def begin_phase(self, limits: Limits, env: Sequence[tuple[str, str]] = ()) -> None:
        """Kill all processes; the next command gets a fresh shell, in `workdir`, under `limits`. Files stay.

        Args:
            limits: of this phase.
            env: variables, besides those of the sandbox.
        """
        variables = {"PATH": _PATH, "HOME": self._spec.home, "LANG": "C.UTF-8", "USER": "agent", "TERM": "dumb"}
        variables |= dict(self._spec.env) | dict(env)
        await self._call({"op": "phase", "limits": asdict(limits), "env": variables}, b"", _GRACE_S)

    async def run(self, command: str, timeout_s: float) -> Ran:
        """Run `command` in the shell, for at most `timeout_s` seconds. What it does wrong is in the answer.

        Raises:
            SandboxError: the sandbox is gone, or the command holds a NUL character or is longer than
                `MAX_COMMAND_BYTES`.
        """
        blob = command.encode(errors="replace")
        if b"\0" in blob or len(blob) > MAX_COMMAND_BYTES:
            raise SandboxError(f"a command has no NUL character and at most {MAX_COMMAND_BYTES} bytes")
        try:
            answer, output = await self._call({"op": "run", "timeout_s": timeout_s}, blob, timeout_s + _GRACE_S)
        except asyncio.CancelledError:
            self._send({"op": "end"}, b"")  # whatever comes while a command runs ends it; nobody waits for the answer
            raise
        return Ran(
            exit_code=answer.exit_code,
            ended=answer.ended,
            stdout=output[: answer.stdout_bytes].decode(errors="replace"),
            stderr=output[answer.stdout_bytes :].decode(errors="replace"),
            truncated=answer.left_out_bytes > 0,
        )

    async def put(self, files: Sequence[PlacedFile]) -> None:
        """Write files. Symbolic links on the way are refused, those at the end replaced.

        Raises:
            SandboxError: a path outside the writable folders, a link on the way, or no room.
        """
        for file in files:
            self._require_inside(file.path)
        header = [(file.path, 0o755 if file.executable else 0o644, len(file.content)) for file in files]
        blob = b"".join(file.content for file in files)
        if len(blob) > MAX_TRANSFER_BYTES:
            raise SandboxError(f"files of {len(blob)} bytes; at most {MAX_TRANSFER_BYTES} are moved at once")
        await self._call({"op": "put", "files": header}, blob, _GRACE_S)

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes | None:
        """Read a plain file. None: there is no such file.

        Raises:
            SandboxError: a path outside the writable folders, a symbolic link, no plain file, or a larger one.
        """
        self._require_inside(path)
        most = min(max_bytes, MAX_TRANSFER_BYTES)
        try:
            return (await self._call({"op": "get", "path": path, "max_bytes": most}, b"", _GRACE_S))[1]
        except _NoSuchFileError:
            return None

    async def empty(self, folder: str) -> None:
        """Remove all that is in a folder; make it if it is missing. It must lie in a writable one."""
        self._require_inside(folder)
        await self._call({"op": "empty", "path": folder}, b"", _GRACE_S)

    async def close(self) -> None:
        """End every process of the sandbox, and wait until they are gone. Safe to call twice, and while it is used.

        A first process that does not end by itself is killed by the kernel; then the others may take a moment more.
        """
        self._fail("it was closed")
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
        if process is None:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()  # the kernel then kills the first process, and with it all others
        await process.wait()

    async def _spawn(self, bwrap: str, line: int) -> Process:
        etc = {path: _memory_file(text.encode()) for path, text in ETC_FILES.items()}
        filters = [_memory_file(program)] if (program := filter_program()) else []
        inside = [PYTHON, "-I", "-S", "-c", _INSIDE.read_text(), str(line), self._spec.workdir]
        try:
            return await asyncio.create_subprocess_exec(
                *bwrap_command(bwrap, self._spec, etc, filters[0] if filters else None),
                *inside,
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=(line, *etc.values(), *filters),
                start_new_session=True,
                env={},
                cwd="/",
                **_as_nobody(),
            )
        finally:
            for fd in (*etc.values(), *filters):
                os.close(fd)

    async def _call(self, header: dict[str, Any], blob: bytes, deadline_s: float) -> tuple[_Answer, bytes]:
        if self._gone or self._writer is None:
            raise SandboxError(f"the sandbox is gone: {self._gone}")
        number = self._send(header, blob)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._writer.drain()
                answered = await future
        except (TimeoutError, ConnectionError) as error:
            slow = isinstance(error, TimeoutError)
            self._fail(f"it did not answer {header['op']!r} within {deadline_s:g} s" if slow else _FIRST_ENDED)
            raise SandboxError(f"the sandbox is gone: {self._gone}") from error
        finally:
            self._waiting.pop(number, None)
        if answered is None:
            raise SandboxError(f"the sandbox is gone: {self._gone}")
        answer, data = answered
        if answer.error is not None:
            failure = _NoSuchFileError if answer.errno == 2 else SandboxError
            raise failure(f"the sandbox could not {header['op']}: {answer.error}")
        return answer, data

    def _send(self, header: dict[str, Any], blob: bytes) -> int:
        """The request's number. Nothing is sent to a sandbox that is gone."""
        number = next(self._numbers)
        if self._writer is not None and not self._gone:
            text = msgspec.json.encode(header | {"number": number})
            self._writer.write(FRAME.pack(len(text), len(blob)) + text + blob)
        return number

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = _FIRST_ENDED
        try:
            while True:
                size, blob_size = FRAME.unpack(await reader.readexactly(FRAME.size))
                if size + blob_size > 2 * MAX_TRANSFER_BYTES:
                    reason = "it sent too much"
                    break
                answer = _decode(await reader.readexactly(size))
                blob = await reader.readexactly(blob_size)
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():  # else: a call that was cancelled
                    future.set_result((answer, blob))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except msgspec.DecodeError as error:
            reason = f"it sent no answer: {error}"
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._gone = self._gone or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    async def _last_words(self) -> str:
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                return (await self._process.stderr.read(2000)).decode(errors="replace").strip()
        return ""

    def _require_inside(self, path: str) -> None:
        if "\0" in path or not self._spec.holds(path):
            raise SandboxError(f"{path!r} lies in none of the sandbox's folders: {', '.join(self._spec.writable)}")


@final
class _NoSuchFileError(SandboxError):
    """There is no file of that name."""


def _as_nobody() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("fathom-sandbox")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
