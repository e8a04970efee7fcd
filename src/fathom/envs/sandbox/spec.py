"""What a sandbox is asked for, and what a command in it gave."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath

from fathom.core.errors import ConfigError

_MIB = 1 << 20
_NOT_WRITABLE = frozenset(
    {"", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the processes of one phase may use. The time of a command is given with the command."""

    cpu_s: int = 60
    """Processor time of one process, in seconds. The kernel kills the process at it."""
    memory_bytes: int = 512 * _MIB
    """Private memory: of one process by the kernel, of all together by looking ten times a second."""
    num_processes: int = 64
    """Processes and threads at one time, the sandbox's own included."""
    file_bytes: int = 64 * _MIB
    """Size of one file."""
    output_bytes: int = 16 * 1024
    """What is kept of each of stdout and stderr: half from the start, half from the end."""

    def __post_init__(self) -> None:
        for name, most in asdict(self).items():
            if most <= 0:
                raise ConfigError(f"sandbox limit {name} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox: where it can be written, what its commands find in their environment, and its first limits."""

    workdir: str = "/task"
    """Where commands start. It lies in one of `writable`."""
    writable: tuple[str, ...] = ("/task", "/tmp")
    """Folders at the top (`/name`) that can be written. They start empty and live in memory; the rest is read-only."""
    disk_bytes: int = 64 * _MIB
    """Room of each writable folder. Memory of the host, while it is used."""
    home: str = "/tmp"
    """The variable HOME."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of the commands, besides PATH, HOME, LANG, USER and TERM. Nothing of the host's own is passed on."""
    limits: Limits = field(default_factory=Limits)
    """Of the first phase."""
    boot_timeout_s: float = 30.0
    """How long the sandbox may take to be there."""

    def __post_init__(self) -> None:
        for folder in self.writable:
            parts = PurePosixPath(folder).parts
            if len(parts) != 2 or parts[0] != "/" or parts[1] in _NOT_WRITABLE or parts[1] == "..":
                raise ConfigError(f"sandbox: {folder!r} cannot be made writable; use a folder at the top, as /app")
        if not self.holds(self.workdir):
            raise ConfigError(f"sandbox: workdir {self.workdir!r} lies in none of {', '.join(self.writable)}")
        if self.disk_bytes <= 0 or self.boot_timeout_s <= 0:
            raise ConfigError("sandbox: disk_bytes and boot_timeout_s must be above 0")

    def holds(self, path: str) -> bool:
        """Whether `path` is written as a place in, or at, one of the writable folders."""
        pure = PurePosixPath(path)
        return ".." not in pure.parts and any(pure.is_relative_to(folder) for folder in self.writable)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFile:
    """A file to put into a sandbox."""

    path: str
    """Where, absolute, in a writable folder. Missing folders are made; what is there is replaced."""
    content: bytes
    """What is in it."""
    executable: bool = False
    """Whether it can be run."""


class Ended(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    """It came to its end, and the shell is there for the next."""
    SHELL_ENDED = "shell_ended"
    """It ended the shell. The next command gets a new one: the folder is the same, variables are gone."""
    TIMEOUT = "timeout"
    """Its time was over: all processes were killed. The next command gets a new shell."""
    MEMORY = "memory"
    """The processes together had more memory than allowed: all were killed."""
    OUTPUT = "output"
    """It wrote without end: all processes were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command gave."""

    exit_code: int | None
    """As shells count: 128 + signal for the killed. None: it was ended by a limit."""
    ended: Ended
    """How."""
    stdout: str
    """With a line that says how much was left out in the middle, if `truncated`. Bad UTF-8 is replaced."""
    stderr: str
    """The same."""
    truncated: bool
    """Whether anything was left out of stdout or stderr."""

    @property
    def timed_out(self) -> bool:
        """Its time was over."""
        return self.ended is Ended.TIMEOUT
