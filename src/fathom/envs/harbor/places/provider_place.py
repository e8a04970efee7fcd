"""A task in a world that one of Harbor's environments makes: an image of its own, built and run by a provider."""

from __future__ import annotations

import asyncio
import math
import shlex
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar, final

from fathom.core.errors import SandboxError
from fathom.envs.harbor.folder import LOGS, HarborTask
from fathom.envs.sandbox import Ended, PlacedFile, Ran

_T = TypeVar("_T")

_CALL_S = 120.0
"""Deadline of a call that moves files."""
_STOP_S = 300.0
"""Deadline of the end, which no other shortens: what it leaves behind costs money."""
_LATE_S = 15.0
"""How much longer than a command may take its answer is waited for."""
_MAX_FILE_BYTES = 64 << 20


class Result(Protocol):
    """What a command gave."""

    @property
    def stdout(self) -> str | None:
        """Its output; of some providers stderr, too."""
        ...

    @property
    def stderr(self) -> str | None:
        """Errors, where they are told apart."""
        ...

    @property
    def return_code(self) -> int:
        """Its exit code."""
        ...


class Box(Protocol):
    """The part of Harbor's `BaseEnvironment` that is used here, in its words."""

    async def start(self, force_build: bool) -> None:
        """Build and start."""
        ...

    async def stop(self, delete: bool) -> Any:
        """Stop; `delete`: and remove."""
        ...

    async def run_healthcheck(self) -> None:
        """Wait until the task's own check passes, if it has one."""
        ...

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Result:
        """Run a command."""
        ...

    async def empty_dirs(self, dirs: Sequence[str], *, chmod: bool = True) -> Result | None:
        """Make folders that hold nothing."""
        ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> Any:
        """Copy a folder into it."""
        ...

    async def download_file(self, source_path: str, target_path: Path | str) -> Any:
        """Copy a file out of it."""
        ...


@final
class ProviderPlace:
    """A `Place`. Each command has a shell of its own, which starts in the task's folder."""

    def __init__(
        self, task: HarborTask, make: Callable[[HarborTask, Path], Box], output_bytes: int, *, stop_s: float = _STOP_S
    ) -> None:
        """Nothing starts yet.

        Args:
            task: the task.
            make: makes a world; it may keep things in a folder of this machine.
            output_bytes: what is kept of each of stdout and stderr of a command.
            stop_s: deadline of the world's end.
        """
        self._task = task
        self._make = make
        self._output_bytes = output_bytes
        self._stop_s = stop_s
        self._folder: Path | None = None
        self._box: Box | None = None
        self._variables: Mapping[str, str] = {}

    async def open(self) -> None:
        """Have it built and started, within the task's own `build_timeout_sec`."""
        self._folder = Path(tempfile.mkdtemp(prefix="fathom-harbor-"))
        build_s = self._task.file.environment.build_timeout_sec
        try:
            self._box = box = self._make(self._task, self._folder)
        except Exception as error:  # a provider may refuse a task in any way
            raise SandboxError(f"the provider refuses {self._task.id}: {type(error).__name__}: {error}") from error
        await _within(build_s, "start", box.start(force_build=False))
        await _within(build_s, "pass its healthcheck", box.run_healthcheck())
        await self.empty(f"{LOGS}/agent")

    async def run(self, command: str, timeout_s: float) -> Ran:
        """Ended inside when its time is over, where the image has `timeout`; given up from outside in any case."""
        seconds = math.ceil(timeout_s)
        inner = f"bash -c {shlex.quote(command)}"
        guarded = f"if command -v timeout >/dev/null; then exec timeout -s KILL {seconds} {inner}; fi; exec {inner}"
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + _LATE_S):
                given = await self._opened.exec(
                    guarded, env=dict(self._variables) or None, timeout_sec=seconds + int(_LATE_S) // 2
                )
        except Exception as error:  # providers raise anything, also where a command was too slow
            if time.monotonic() - began_s >= timeout_s:
                return Ran(exit_code=None, ended=Ended.TIMEOUT, stdout="", stderr="", truncated=False)
            raise SandboxError(f"the provider could not run a command: {type(error).__name__}: {error}") from error
        killed = given.return_code in (124, 137) and time.monotonic() - began_s >= seconds
        stdout, left_out = _shortened(given.stdout or "", self._output_bytes)
        stderr, also_left_out = _shortened(given.stderr or "", self._output_bytes)
        return Ran(
            exit_code=None if killed else given.return_code,
            ended=Ended.TIMEOUT if killed else Ended.EXITED,
            stdout=stdout,
            stderr=stderr,
            truncated=left_out or also_left_out,
        )

    async def begin_tests(self) -> None:
        """Commands get the tests' variables. What the agent left running runs on, as with Harbor itself."""
        self._variables = {"PYTHONNOUSERSITE": "1", **self._task.file.verifier.env}

    async def empty(self, folder: str) -> None:
        """As root."""
        done = await _within(_CALL_S, f"empty {folder}", self._opened.empty_dirs([folder]))
        if done is not None and done.return_code != 0:
            raise SandboxError(f"{folder} could not be emptied: {(done.stderr or done.stdout or '')[-500:]}")

    async def put(self, files: Sequence[PlacedFile]) -> None:
        """Folder by folder at the top."""
        with tempfile.TemporaryDirectory(prefix="fathom-harbor-put-") as scratch:
            tops = {PurePosixPath(file.path).parts[1] for file in files}
            for file in files:
                path = Path(scratch, file.path.lstrip("/"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.content)
                path.chmod(0o755 if file.executable else 0o644)
            for top in sorted(tops):
                await _within(_CALL_S, f"take /{top}", self._opened.upload_dir(Path(scratch, top), f"/{top}"))

    async def get(self, path: str) -> bytes | None:
        """By way of a file of this machine."""
        quoted = shlex.quote(path)
        ask = f"[ ! -L {quoted} ] && [ -f {quoted} ] && wc -c < {quoted}"
        found = await _within(_CALL_S, f"look at {path}", self._opened.exec(ask, timeout_sec=int(_CALL_S)))
        if found.return_code != 0:
            return None
        size = (found.stdout or "").strip()
        if not size.isdigit() or int(size) > _MAX_FILE_BYTES:
            raise SandboxError(f"{path} has {size[:100]!r} bytes, and {_MAX_FILE_BYTES} are taken at most")
        with tempfile.TemporaryDirectory(prefix="fathom-harbor-get-") as scratch:
            copy = Path(scratch, "file")
            await _within(_CALL_S, f"give {path}", self._opened.download_file(path, copy))
            return copy.read_bytes()

    async def close(self) -> None:
        """Stop and delete it, also one whose start was cut short."""
        box, self._box = self._box, None
        try:
            if box is not None:
                await _within(self._stop_s, "stop", asyncio.shield(box.stop(delete=True)))
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    @property
    def _opened(self) -> Box:
        if self._box is None:
            raise SandboxError("the sandbox is gone: it is not open")
        return self._box


async def _within(seconds: float, what: str, work: Awaitable[_T]) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise SandboxError(f"the provider's sandbox did not {what} within {seconds:g} s") from error
    except Exception as error:  # providers raise anything
        raise SandboxError(f"the provider's sandbox did not {what}: {type(error).__name__}: {error}") from error


def _shortened(text: str, size_bytes: int) -> tuple[str, bool]:
    """Half of what is kept from the start, half from the end; and whether anything was left out."""
    data = text.encode(errors="replace")
    if len(data) <= size_bytes:
        return text, False
    first, last = data[: size_bytes // 2], data[len(data) - (size_bytes - size_bytes // 2) :]
    left_out = f"\n[{len(data) - size_bytes} bytes left out]\n"
    return first.decode(errors="replace") + left_out + last.decode(errors="replace"), True
