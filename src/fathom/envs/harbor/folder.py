"""A task folder: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fathom.core.errors import ConfigError, DataError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import Task
from fathom.envs.harbor.dockerfile import Layout, plain_files, read_dockerfile
from fathom.envs.harbor.task_file import TaskFile, read_task_file
from fathom.envs.sandbox import Limits, PlacedFile, SandboxSpec

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
"""Where Harbor puts them. Empty while an agent works."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one task may use at most, whatever it asks for; and what it gets when it asks for nothing."""

    memory_mb: int
    """Memory of its processes together."""
    storage_mb: int
    """Each writable folder."""
    num_processes: int
    """Processes and threads."""
    output_bytes: int
    """What is kept of what a command prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task folder, read and found fit for where it is to run. Its files are read again when they are needed."""

    id: TaskId
    """The folder's name."""
    folder: Path
    """Where it lies."""
    instruction: str
    """What the agent is asked."""
    file: TaskFile
    """`task.toml`."""
    layout: Layout | None
    """What the Dockerfile asks for, for the local sandbox. None: a provider of Harbor's builds the image."""

    @property
    def task(self) -> Task:
        """As the run sees it. Nothing of tests or solution is in it."""
        return Task(id=self.id, messages=({"role": "user", "content": self.instruction},), answer="")

    def spec(self, room: Room) -> SandboxSpec:
        """The sandbox it needs.

        Raises:
            ConfigError: it puts something where nothing can be written.
        """
        asked, layout = self.file.environment, self._layout
        workdir = asked.workdir or layout.workdir
        places = [workdir, *layout.folders, *(path for path, _ in layout.files)]
        tops = {"/".join(PurePosixPath(place).parts[:2]).replace("//", "/") for place in places}
        memory = min(asked.memory_mb or room.memory_mb, room.memory_mb) * _MIB
        storage = min(asked.storage_mb or room.storage_mb, room.storage_mb) * _MIB
        return SandboxSpec(
            workdir=workdir,
            writable=tuple(sorted(tops | {"/tmp", "/root", TESTS, SOLUTION, LOGS})),
            disk_bytes=storage,
            home="/root",
            env=(*layout.env, *asked.env.items()),
            limits=Limits(
                memory_bytes=memory,
                num_processes=room.num_processes,
                file_bytes=storage,
                output_bytes=room.output_bytes,
            ),
            boot_timeout_s=asked.build_timeout_sec,
        )

    def folders(self) -> tuple[str, ...]:
        """Folders that are there, empty or not."""
        return self._layout.folders

    def environment_files(self) -> list[PlacedFile]:
        """What COPY puts there."""
        return [placed(path, target) for target, path in self._layout.files]

    def tests(self) -> list[PlacedFile]:
        """`tests/`, for after the agent has stopped."""
        return _below(self.folder / "tests", TESTS)

    def solution(self) -> list[PlacedFile]:
        """`solution/`, for the oracle only."""
        return _below(self.folder / "solution", SOLUTION)

    @property
    def _layout(self) -> Layout:
        assert self.layout is not None, "only what was read for the local sandbox is put into it"
        return self.layout


def read_task(folder: Path, *, local: bool = True) -> HarborTask:
    """Read one task folder.

    Args:
        folder: the folder.
        local: it is to run in the local sandbox; False: where a provider of Harbor's builds its image.

    Raises:
        DataError: it is not whole. ConfigError: it asks for what cannot be done there.
    """
    file = read_task_file(folder / "task.toml", local=local)
    try:
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder}/instruction.md cannot be read: {error}") from error
    if not instruction:
        raise DataError(f"{folder}/instruction.md is empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder} has no tests/test.sh")
    task = HarborTask(
        id=TaskId(folder.name),
        folder=folder,
        instruction=instruction,
        file=file,
        layout=read_dockerfile(folder / "environment") if local else None,
    )
    if not local:
        return task
    try:
        task.spec(Room(memory_mb=1, storage_mb=1, num_processes=1, output_bytes=1))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    return task


def task_folders(parents: Sequence[Path]) -> list[Path]:
    """The task folders in `parents`, each of which may be one itself; sorted by name within a parent.

    Raises:
        DataError: a parent is no folder, or holds no task.
    """
    found: list[Path] = []
    for parent in parents:
        if not parent.is_dir():
            told = f"{parent} is a file" if parent.exists() else f"no folder {parent} in {Path.cwd()}"
            raise DataError(f"{told}; give a task's folder, or a folder of such")
        inner = [parent] if (parent / "task.toml").is_file() else sorted(p.parent for p in parent.glob("*/task.toml"))
        if not inner:
            raise DataError(f"{parent} is no task folder and has none in it (there is no task.toml)")
        found += [path.absolute() for path in inner]
    return found


def placed(path: Path, target: str) -> PlacedFile:
    """A file of this machine, to be put at `target`."""
    return PlacedFile(path=target, content=path.read_bytes(), executable=bool(path.stat().st_mode & 0o100))


def _below(folder: Path, target: str) -> list[PlacedFile]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    return [placed(path, f"{target}/{path.relative_to(folder).as_posix()}") for path in plain_files(folder)]
