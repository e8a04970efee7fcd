"""Task folders in Harbor's format as an environment in which an agent acts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from pydantic import Field, JsonValue

from fathom.config.section import Section
from fathom.core.errors import ConfigError
from fathom.core.ports.agent import AgentEpisode
from fathom.core.ports.environment import Task
from fathom.core.records.message import Message
from fathom.envs.harbor.actors import BashAgent
from fathom.envs.harbor.episode import HarborEpisode
from fathom.envs.harbor.folder import HarborTask, Room, read_task, task_folders
from fathom.envs.harbor.places import LocalPlace
from fathom.envs.harbor.places.provider import LOCAL, Provider, provider_of
from fathom.envs.harbor.places.provider_place import ProviderPlace
from fathom.envs.harbor.script import read_script

_LOCAL_ONLY = frozenset({"memory_mb", "storage_mb", "num_processes"})
"""Options of the local sandbox alone."""


class HarborOptions(Section):
    """Which tasks, where they run, and how a model works on them: it is given a bash tool."""

    folders: tuple[str, ...] = Field(min_length=1)
    """Task folders, or folders of task folders. From these come the training tasks."""
    eval_folders: tuple[str, ...] = ()
    """The same for the held-out tasks."""
    eval_ids: tuple[str, ...] = ()
    """Tasks of `folders` that are held out: folder names, `*` stands for anything."""
    provider: str = LOCAL
    """Where they run: `local`, the sandbox of this machine; where Harbor is installed, a name of Harbor's own, as
    `docker`, `podman` or `modal`, or `package.module:ClassName` for Harbor to import."""
    provider_options: dict[str, JsonValue] = Field(default={})
    """What Harbor's environment is given, by its own names. Only with a provider of Harbor's."""
    system: str = ""
    """System prompt. Empty: none."""
    tool_description: str = "Run a command."
    """What the model is told of the bash tool."""
    max_turns: int = Field(default=16, gt=0)
    """Answers of the model in one episode, at most."""
    command_timeout_s: float = Field(default=30.0, gt=0)
    """How long one command may take."""
    output_bytes: int = Field(default=4096, gt=0)
    """What is kept of each of stdout and stderr of a command: half from the start, half from the end."""
    memory_mb: int = Field(default=512, gt=0)
    """Memory of a local sandbox's processes, where the task does not ask for less."""
    storage_mb: int = Field(default=64, gt=0)
    """Room of each writable folder of a local sandbox, where the task does not ask for less. It is memory of this
    machine."""
    num_processes: int = Field(default=64, gt=0)
    """Processes and threads in a local sandbox."""


@final
class HarborEnvironment:
    """A `DemonstratedAgentEnvironment`. All folders are read when it is made; one that cannot be honoured is named."""

    Options = HarborOptions

    def __init__(self, options: HarborOptions) -> None:
        """Read the folders.

        Raises:
            DataError: a folder that is not whole. ConfigError: what cannot be done where tasks run, a name that occurs
                twice, a pattern of `eval_ids` that fits nothing, a missing program, or no Harbor.
        """
        self._provider = _provider(options)
        local = self._provider is None
        given = [read_task(path, local=local) for path in _paths(options.folders)]
        held = [read_task(path, local=local) for path in _paths(options.eval_folders)]
        for pattern in options.eval_ids:
            if not any(fnmatchcase(task.id, pattern) for task in given):
                raise ConfigError(f"task.options: eval_ids {pattern!r} fits no task of {', '.join(options.folders)}")
        held += [task for task in given if _fits(task, options.eval_ids)]
        train = [task for task in given if not _fits(task, options.eval_ids)]
        self._by_id = {task.id: task for task in (*train, *held)}
        if len(self._by_id) < len(train) + len(held):
            names = [task.id for task in (*train, *held)]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"task.options: two task folders are called {twice!r}; names tell tasks apart")
        self._train, self._held = tuple(task.task for task in train), tuple(task.task for task in held)
        self._room = Room(
            memory_mb=options.memory_mb,
            storage_mb=options.storage_mb,
            num_processes=options.num_processes,
            output_bytes=options.output_bytes,
        )
        self._agent = BashAgent(
            system=options.system,
            description=options.tool_description,
            max_turns=options.max_turns,
            command_timeout_s=options.command_timeout_s,
        )

    def tasks(self) -> Sequence[Task]:
        """Training tasks, in the order of the folders."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out tasks."""
        return self._held

    def episode(self, task: Task) -> AgentEpisode:
        """A new attempt."""
        found = self._by_id[task.id]
        if self._provider is None:
            return HarborEpisode(found, LocalPlace(found, self._room), self._agent)
        place = ProviderPlace(found, self._provider.box, self._room.output_bytes)
        return HarborEpisode(found, place, self._agent)

    def script(self, task: Task) -> Sequence[Message]:
        """What `solution/dialogue.json` lists. Raises DataError when there is none."""
        return read_script(self._by_id[task.id])


def _provider(options: HarborOptions) -> Provider | None:
    given = sorted(_LOCAL_ONLY & options.model_fields_set)
    if given and options.provider != LOCAL:
        raise ConfigError(
            f"task.options: {', '.join(given)} bounds the local sandbox, and provider = {options.provider!r} takes its "
            "bounds from the task; remove it, or see provider_options (override_memory_mb, ...)"
        )
    return provider_of(options.provider, options.provider_options)


def _paths(folders: Sequence[str]) -> list[Path]:
    return task_folders([Path(folder) for folder in folders])


def _fits(task: HarborTask, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(task.id, pattern) for pattern in patterns)
