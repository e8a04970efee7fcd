"""An environment of Harbor's own kind: its base class, over the local sandbox. Needs Harbor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from boxed import SandboxBox
from harbor.environments.base import BaseEnvironment, ExecResult


class OwnBox(BaseEnvironment):
    """What Harbor's class does itself (folders emptied by commands, checks of health) is left to it."""

    made: ClassVar[list[OwnBox]] = []

    def __init__(self, *args: Any, note: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.note = note
        self.box = SandboxBox(files=self.environment_dir / "data")
        OwnBox.made.append(self)

    @staticmethod
    def type() -> str:
        return "own"

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError("no Dockerfile")

    async def start(self, force_build: bool) -> None:
        await self.box.start(force_build)

    async def stop(self, delete: bool) -> None:
        await self.box.stop(delete)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        merged = self._merge_env(env)
        given = await self.box.exec(command, cwd, merged, timeout_sec, self._resolve_user(user))
        return ExecResult(stdout=given.stdout, stderr=given.stderr, return_code=given.return_code)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.box.upload_dir(source_dir, target_dir)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        raise AssertionError("folders go in and files come out; nothing else is asked for")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.box.download_file(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise AssertionError("folders go in and files come out; nothing else is asked for")
