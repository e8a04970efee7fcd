"""The small part of Dockerfiles that can be followed without images: FROM, COPY, WORKDIR, ENV, LABEL.

FROM names a plain base image; the host's own programs stand in for it, and `fathom tasks check` shows whether they do.
Everything else is refused, with its line.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from fathom.core.errors import ConfigError, DataError

BASES = ("debian", "ubuntu", "python", "bash", "scratch")
"""Images that the host's programs may stand in for, by name without tag."""

_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a Dockerfile asks for."""

    workdir: str
    """Where commands start."""
    env: tuple[tuple[str, str], ...]
    """Variables."""
    files: tuple[tuple[str, Path], ...]
    """Where each file comes to lie, and where it is on this machine."""
    folders: tuple[str, ...]
    """Folders that are there, empty or not."""


def read_dockerfile(folder: Path) -> Layout:
    """What `folder/Dockerfile` asks for.

    Raises:
        ConfigError: a step that cannot be followed here, with its line. DataError: no Dockerfile, or a wrong one.
    """
    path = folder / "Dockerfile"
    for name in (".dockerignore", "docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} cannot be honoured by the local sandbox; run this task with Harbor itself"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    reading = _Reading(path)
    for number, line in _lines(text):
        reading.step(number, line)
    return reading.layout()


def plain_files(folder: Path) -> list[Path]:
    """All files below `folder`, in a fixed order.

    Raises:
        DataError: a symbolic link, or what is neither file nor folder: it might show something of this machine.
    """
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is a link or no plain file; task folders hold plain files only")
        if path.is_file():
            found.append(path)
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    """(number of its first line, instruction) with continued lines joined and comments left out."""
    found: list[tuple[int, str]] = []
    open_line, begun = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if open_line else number
        open_line += line.strip()
        if open_line.endswith("\\"):
            open_line = open_line[:-1] + " "
            continue
        found.append((begun, open_line))
        open_line = ""
    return [*found, (begun, open_line)] if open_line else found


@final
class _Reading:
    """Goes through the steps, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context = path.parent
        self._based = False
        self._workdir = PurePosixPath("/")
        self._env: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        self._folders: dict[str, None] = {}

    def layout(self) -> Layout:
        """What was asked for."""
        if not self._based:
            raise DataError(f"{self._path} has no FROM")
        if self._workdir == PurePosixPath("/"):
            raise ConfigError(f"{self._path} sets no WORKDIR; the local sandbox needs one, as WORKDIR /app")
        return Layout(
            workdir=str(self._workdir),
            env=tuple(self._env.items()),
            files=tuple(self._files.items()),
            folders=tuple(self._folders),
        )

    def step(self, number: int, line: str) -> None:
        """Follow one instruction."""
        word, _, rest = line.partition(" ")
        where = f"{self._path}, line {number}: {line!r}"
        if word.upper() not in ("FROM", "COPY", "WORKDIR", "ENV", "LABEL"):
            raise ConfigError(
                f"{where}: the local sandbox follows FROM, COPY, WORKDIR, ENV and LABEL only; run this task with "
                "Harbor itself"
            )
        if word.upper() == "LABEL":
            return
        if "$" in rest:
            raise ConfigError(f"{where}: variables are not replaced here; write the value")
        try:
            parts = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if word.upper() != "FROM" and not self._based:
            raise DataError(f"{where}: FROM comes first")
        match word.upper():
            case "FROM":
                self._from(parts, where)
            case "WORKDIR":
                if len(parts) != 1:
                    raise DataError(f"{where}: WORKDIR takes one folder")
                self._workdir = self._within(parts[0], where)
                self._folders[str(self._workdir)] = None
            case "ENV":
                self._set(parts, where)
            case _:
                self._copy(parts, where)

    def _from(self, parts: list[str], where: str) -> None:
        name = parts[0].partition("@")[0].partition(":")[0] if parts else ""
        if self._based or len(parts) != 1 or name not in BASES:
            raise ConfigError(
                f"{where}: one FROM of a plain image ({', '.join(BASES)}) can be followed here, the host's programs "
                "standing in for it; run this task with Harbor itself"
            )
        self._based = True

    def _set(self, parts: list[str], where: str) -> None:
        if len(parts) > 1 and "=" not in parts[0]:  # the older form: the rest of the line is the value
            parts = [f"{parts[0]}={' '.join(parts[1:])}"]
        if not parts or any("=" not in part for part in parts):
            raise DataError(f"{where}: ENV takes NAME=VALUE")
        self._env |= dict(part.split("=", 1) for part in parts)

    def _copy(self, parts: list[str], where: str) -> None:
        if len(parts) < 2 or any(part.startswith("--") or _WILD & set(part) for part in parts):
            raise ConfigError(f"{where}: COPY takes plain names here, no options and no wildcards")
        *sources, given = parts
        target = self._within(given, where)
        into = given.endswith("/") or len(sources) > 1 or str(target) in self._folders
        for source in sources:
            path = self._context / source.lstrip("/")
            if ".." in PurePosixPath(source).parts or path.is_symlink() or not path.exists():
                raise DataError(f"{where}: there is no {source} in {self._context}")
            if path.is_dir():
                self._folders[str(target)] = None
                for file in plain_files(path):
                    if file != self._path:
                        self._files[str(target / file.relative_to(path).as_posix())] = file
                for folder in (entry for entry in sorted(path.rglob("*")) if entry.is_dir()):
                    self._folders[str(target / folder.relative_to(path).as_posix())] = None
            else:
                self._files[str(target / path.name if into else target)] = path

    def _within(self, given: str, where: str) -> PurePosixPath:
        path = self._workdir / given
        if ".." in path.parts or len(path.parts) < 2:
            raise ConfigError(f"{where}: name a folder below / without '..'")
        return path
