"""What a provider of Harbor's does, done with the local sandbox: the calls are Harbor's, and so are their forms."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fathom.envs.sandbox import PlacedFile, Sandbox, SandboxSpec

WORKDIR = "/app"
SPEC = SandboxSpec(workdir=WORKDIR, writable=(WORKDIR, "/tmp", "/root", "/tests", "/solution", "/logs"), home="/root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """As Harbor's `ExecResult`."""

    stdout: str | None
    stderr: str | None
    return_code: int


@dataclass(slots=True)
class SandboxBox:
    """A world whose files are those of a folder. Fails, or hangs, in the calls that are named."""

    files: Path
    fails: Sequence[str] = ()
    hangs: Sequence[str] = ()
    asked: list[str] = field(default_factory=list[str])
    """Calls, in order."""
    sandbox: Sandbox | None = None

    async def start(self, force_build: bool) -> None:
        assert not force_build
        await self.meet("start")
        self.sandbox = Sandbox(SPEC)
        await self.sandbox.open()
        await self.upload_dir(self.files, WORKDIR)

    async def stop(self, delete: bool) -> None:
        assert delete
        if self.sandbox is not None:
            await self.sandbox.close()
        await self.meet("stop")

    async def run_healthcheck(self) -> None:
        await self.meet("run_healthcheck")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Given:
        await self.meet("exec")
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (env or {}).items())
        ran = await self.opened.run(f"(cd {cwd or WORKDIR}; {exports}{command})", timeout_sec or 60.0)
        if ran.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return Given(stdout=ran.stdout or None, stderr=ran.stderr or None, return_code=ran.exit_code or 0)

    async def empty_dirs(self, dirs: Sequence[str], *, chmod: bool = True) -> Given | None:
        await self.meet("empty_dirs")
        for folder in dirs:
            await self.opened.empty(folder)
        return None

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.meet("upload_dir")
        source = Path(source_dir)
        paths = [path for path in source.rglob("*") if path.is_file()]
        await self.opened.put(
            [
                PlacedFile(path=f"{target_dir}/{path.relative_to(source).as_posix()}", content=path.read_bytes())
                for path in paths
            ]
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.meet("download_file")
        content = await self.opened.get(source_path)
        assert content is not None
        Path(target_path).write_bytes(content)

    async def meet(self, call: str) -> None:
        """What goes wrong in a call."""
        self.asked.append(call)
        if call in self.fails:
            raise RuntimeError(f"no {call}")
        if call in self.hangs:
            with suppress(TimeoutError):
                await asyncio.sleep(3600)

    @property
    def opened(self) -> Sandbox:
        assert self.sandbox is not None
        return self.sandbox
