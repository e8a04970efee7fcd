"""`task.toml`, Harbor's schema 1.4: what is in it, and what of it the local sandbox cannot honour."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fathom.core.errors import ConfigError, DataError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.ASCII)
_MIB_OF = {"G": 1024, "M": 1, "K": 1 / 1024}
VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
"""Schemas that are read."""


class _Table(BaseModel):
    """A table of the file. A key that is not known here is refused: it might matter."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class AgentTable(_Table):
    """`[agent]`."""

    timeout_sec: float | None = Field(default=None, gt=0)
    """How long an agent may take. None: as long as the run lets it."""


class VerifierTable(_Table):
    """`[verifier]`."""

    timeout_sec: float = Field(default=600.0, gt=0)
    """How long the tests may take."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the tests."""
    environment_mode: str = "shared"
    """Where the tests run. Only in the agent's own sandbox."""


class SolutionTable(_Table):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the solution."""


class EnvironmentTable(_Table):
    """`[environment]`."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    """How long making the sandbox may take."""
    docker_image: str | None = None
    """A ready image. Refused: there are no images here."""
    os: str = "linux"
    """The operating system."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors the task was made for. Not enforced."""
    memory_mb: int | None = Field(default=None, gt=0)
    """Memory of the sandbox, at most what the environment's options allow."""
    storage_mb: int | None = Field(default=None, gt=0)
    """Room of each writable folder, at most what the environment's options allow."""
    gpus: int = Field(default=0, ge=0)
    """Refused above 0."""
    gpu_types: list[str] | None = None
    """Refused."""
    network_mode: str | None = None
    """Only `no-network` can be had; when left out, there is none either."""
    allow_internet: bool | None = None
    """The older word for it. True is refused."""
    allowed_hosts: list[str] | None = None
    """Refused."""
    workdir: str | None = None
    """Where the agent starts, in place of the Dockerfile's WORKDIR."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of all commands."""
    mcp_servers: list[Any] = Field(default_factory=list)
    """Refused."""
    skills_dir: str | None = None
    """Refused."""
    healthcheck: dict[str, Any] | None = None
    """Refused."""


class TaskFile(_Table):
    """The whole file."""

    schema_version: str = "1.0"
    """One of `VERSIONS`."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Name, authors, keywords: for people."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """For people."""
    source: str | None = None
    """Where the task came from."""
    agent: AgentTable = AgentTable()
    """Of the agent."""
    verifier: VerifierTable = VerifierTable()
    """Of the tests."""
    solution: SolutionTable = SolutionTable()
    """Of the solution."""
    environment: EnvironmentTable = EnvironmentTable()
    """Of the sandbox."""


def read_task_file(path: Path, *, local: bool = True) -> TaskFile:
    """Read and judge `task.toml`.

    Args:
        path: the file.
        local: for the local sandbox; False: for one that a provider of Harbor's makes of an image, which can do more.

    Raises:
        DataError: missing, no TOML, or not of the schema. ConfigError: it asks for what cannot be had here, by name.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if "version" in table:  # as schema 1.0 called it
        table["schema_version"] = table.pop("version")
    _read_sizes(path, table.get("environment"))
    where = "the local sandbox" if local else "Fathom"
    for key in ("steps", "artifacts"):
        if table.pop(key, None):
            raise ConfigError(f"{path}: `{key}` cannot be honoured by {where}; run this task with Harbor itself")
    try:
        found = TaskFile.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
    if found.schema_version not in VERSIONS:
        raise DataError(f"{path}: schema_version {found.schema_version!r} is not one of {', '.join(VERSIONS)}")
    asked = _not_to_be_had(found, local=local)
    if asked:
        raise ConfigError(f"{path}: {'; '.join(asked)}: {where} cannot; run this task with Harbor itself")
    return found


def _read_sizes(path: Path, environment: Any) -> None:
    """Memory and storage as schema 1.0 wrote them: `memory = "2G"` is `memory_mb = 2048`."""
    if not isinstance(environment, dict):
        return
    for word in ("memory", "storage"):
        written: Any = environment.get(word)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(written, str):
            continue  # not there, or not of the schema
        size = _SIZE.fullmatch(written.strip().upper())
        if size is None:
            raise DataError(f"{path}: environment.{word} = {written!r} is no size; write {word}_mb")
        size_mb = int(float(size[1]) * _MIB_OF[size[2]])
        if environment.setdefault(f"{word}_mb", size_mb) != size_mb:  # pyright: ignore[reportUnknownMemberType]
            raise DataError(f"{path}: environment.{word} and environment.{word}_mb contradict each other; keep one")
        del environment[word]


def _not_to_be_had(file: TaskFile, *, local: bool) -> list[str]:
    table = file.environment
    of_images = [
        (table.docker_image, f"docker_image = {table.docker_image!r}"),
        (table.gpus, f"gpus = {table.gpus}"),
        (table.gpu_types, "gpu_types"),
        (table.allow_internet, "allow_internet = true"),
        (table.network_mode not in (None, "no-network"), f"network_mode = {table.network_mode!r}"),
        (table.allowed_hosts, "allowed_hosts"),
        (table.healthcheck, "healthcheck"),
    ]
    of_agents = [
        (table.os != "linux", f"os = {table.os!r}"),
        (table.mcp_servers, "mcp_servers"),
        (table.skills_dir, "skills_dir"),
        (file.verifier.environment_mode != "shared", f"environment_mode = {file.verifier.environment_mode!r}"),
    ]
    said = [what for given, what in (*(of_images if local else ()), *of_agents) if given]
    for name, env in (("environment", table.env), ("verifier", file.verifier.env), ("solution", file.solution.env)):
        said += [f"{name}.env.{key} takes a variable of the host" for key, value in env.items() if "${" in value]
    return said
