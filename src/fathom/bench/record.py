"""The record of one benchmark: what was measured, where and on what, with every raw number."""

from __future__ import annotations

import os
import platform
import re
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

import fathom
from fathom.config.section import Section
from fathom.core.errors import ConfigError

_LIBRARIES = ("fathom-rl", "torch", "transformers", "numpy", "tokenizers", "safetensors", "msgspec")
_GIT_S = 10.0

Say = Callable[[str], None]
"""Told what happens, a line at a time."""


class Sample(msgspec.Struct, frozen=True, tag="bench_sample.1"):
    """One raw number."""

    variant: str
    """What was run, e.g. `wait, S=2`."""
    measure: str
    """What was measured of it, e.g. `wall`."""
    unit: str
    """Its unit, e.g. `s`."""
    repeat: int
    """Which repeat, from 0. Samples of one repeat were taken next to each other and may be divided."""
    value: float
    """The number."""


class Target(msgspec.Struct, frozen=True, tag="bench_target.1"):
    """A number that was aimed at."""

    claim: str
    """The claim, in words."""
    measured: float
    """What was measured, in the claim's unit."""
    limit: float
    """The bound."""
    at_most: bool
    """True: `measured` must not exceed the bound. False: it must reach it."""
    required: bool
    """True: missing it is a fault of the code. False: it depends on the machine, and is only reported."""

    @property
    def met(self) -> bool:
        """Whether the claim holds. NaN never does."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


class Machine(msgspec.Struct, frozen=True, tag="bench_machine.1"):
    """Where it was measured."""

    system: str
    """Operating system and architecture."""
    processor: str
    """Model of the processor."""
    cores: int
    """Cores this process may use."""
    memory_bytes: int
    """Physical memory."""
    load: float
    """Load average over the last minute when the bench began: a busy machine measures something else."""
    python: str
    """Version of Python."""
    libraries: dict[str, str]
    """Version by distribution."""


class GitState(msgspec.Struct, frozen=True, tag="bench_git.1"):
    """The checkout that was measured."""

    commit: str
    """Hash of HEAD."""
    changed: tuple[str, ...]
    """Files that differ from it, as `git status --porcelain` prints them."""


class BenchRecord(msgspec.Struct, frozen=True, tag="bench.1"):
    """One benchmark."""

    id: str
    """Its name: workload, time, and what makes it unique."""
    workload: str
    """Which workload."""
    started_s: float
    """Wall-clock time it began, seconds since the epoch."""
    seconds: float
    """Seconds it took, everything included."""
    machine: Machine
    """Where."""
    git: GitState | None
    """The checkout. None: the package does not lie in one."""
    options: msgspec.Raw
    """The workload's options as JSON."""
    samples: tuple[Sample, ...]
    """Every number, in the order of measurement."""
    targets: tuple[Target, ...]
    """What was aimed at."""
    notes: tuple[str, ...]
    """What a reader has to know to understand the numbers."""

    @property
    def failed(self) -> bool:
        """True when a required target was missed."""
        return any(target.required and not target.met for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a workload returns."""

    samples: Sequence[Sample]
    """See `BenchRecord`."""
    targets: Sequence[Target] = ()
    """See `BenchRecord`."""
    notes: Sequence[str] = ()
    """See `BenchRecord`."""


def take(workload: str, options: Section, measure: Callable[[], Measured]) -> BenchRecord:
    """Run a workload and make its record."""
    machine, git, started_s, began = this_machine(), _git_state(), time.time(), time.perf_counter()
    measured = measure()
    return BenchRecord(
        id=f"{workload}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_s))}-{secrets.token_hex(3)}",
        workload=workload,
        started_s=started_s,
        seconds=time.perf_counter() - began,
        machine=machine,
        git=git,
        options=msgspec.Raw(options.model_dump_json().encode()),
        samples=tuple(measured.samples),
        targets=tuple(measured.targets),
        notes=tuple(measured.notes),
    )


def require_place(folder: Path) -> None:
    """Raise ConfigError where no record can be filed: to be asked before anything is measured."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"records cannot be filed in {folder}: {existing} is no folder to write in; give another --out"
        )


def file_record(record: BenchRecord, folder: Path) -> Path:
    """Write `folder/ID.json`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.id}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    return path


def read_record(path: Path) -> BenchRecord:
    """Read what `file_record` wrote. Raises ConfigError when it is not there, or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no record of a bench: {error}; they are filed in the folder of --out") from error


def values(samples: Sequence[Sample], variant: str, measure: str) -> list[float]:
    """The numbers of one measure of one variant, in order of repeats."""
    chosen = [sample for sample in samples if (sample.variant, sample.measure) == (variant, measure)]
    return [sample.value for sample in sorted(chosen, key=lambda sample: sample.repeat)]


def median(samples: Sequence[Sample], variant: str, measure: str) -> float:
    """Their median."""
    return statistics.median(values(samples, variant, measure))


def ratios(samples: Sequence[Sample], measure: str, above: str, below: str) -> list[Sample]:
    """`above` divided by `below`, repeat by repeat."""
    pairs = zip(values(samples, above, measure), values(samples, below, measure), strict=True)
    return [
        Sample(variant=f"{above} / {below}", measure=f"{measure}, ratio", unit="", repeat=repeat, value=top / bottom)
        for repeat, (top, bottom) in enumerate(pairs)
    ]


def alternating(variants: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repeat, variant): every other repeat runs backwards, so that drift of the machine favours none."""
    for repeat in range(repeats):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            yield repeat, variant


def this_machine() -> Machine:
    """The machine this runs on."""
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        load=os.getloadavg()[0],
        python=platform.python_version(),
        libraries={name: version(name) for name in _LIBRARIES},
    )


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text(), re.MULTILINE) if facts.exists() else None
    return found[1] if found else platform.processor() or "unknown"


def _git_state() -> GitState | None:
    """The checkout this package lies in."""
    source = Path(fathom.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout

    try:
        if not git("ls-files", "--", ".").strip():
            return None  # installed below somebody else's checkout
        return GitState(
            commit=git("rev-parse", "HEAD").strip(), changed=tuple(git("status", "--porcelain").split("\n")[:-1])
        )
    except (OSError, subprocess.SubprocessError):
        return None
