"""Can this machine run Fathom? Each check says what it found and, when it fails, what to do."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
from pydantic import JsonValue

from fathom.bench.options import ProbeOptions
from fathom.core.ports.environment import Environment
from fathom.envs.gold_check import check_environment
from fathom.envs.harbor.admission import check_folders
from fathom.envs.harbor.folder import task_folders
from fathom.envs.harbor.generating import write_tasks
from fathom.envs.registry import BUILT_IN, build_environment

_MIN_PYTHON = (3, 11)
_MIN_MEMORY_BYTES, _MIN_DISK_BYTES, _MIN_SHARED_BYTES = 2e9, 1e9, 0.1e9
_CONNECT_S = 5.0
_GOLD_TASKS = 50
_PROBE_TOKENS = 200
_SANDBOXED_TASKS = 2
_ACTED = frozenset({"gymnasium", "mcp", "verifiers"})
"""Built-in environments that need a world, a server or a taskset of one's own."""
EXTRAS = {
    "reasoning-gym": ("reasoning_gym",),
    "parquet": ("pyarrow",),
    "gguf": ("gguf", "accelerate"),
    "nixl": ("nixl_cu12",),
    "mooncake": ("mooncake",),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules that each extra brings."""


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    """It works; a person may want to know."""
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True, tag="finding.1"):
    """What one check found."""

    check: str
    """What was looked at."""
    verdict: Verdict
    """How it ended."""
    found: str
    """What was found."""
    advice: str = ""
    """What to do. Empty: nothing."""


Answer = tuple[Verdict, str, str]
"""(verdict, what was found, what to do)."""


def examine(folder: Path) -> Iterator[Finding]:
    """Every check, quick ones first, each finding as soon as it is known.

    Args:
        folder: where runs will be kept; its disk is looked at.
    """
    checks: dict[str, Callable[[], Answer]] = {
        "python": _python,
        "cores": _cores,
        "threads": _threads,
        "memory": _memory,
        "disk": lambda: _disk(folder),
        "shared memory": _shared_memory,
        "loopback": _loopback,
        "torch": _torch,
        **{f"extra {extra}": partial(_extra, extra) for extra in EXTRAS},
        **{f"gold answers, {kind}": partial(_gold, kind) for kind in BUILT_IN},
        "engine and trainer": _engine_and_trainer,
    }
    for name, check in checks.items():
        try:
            verdict, found, advice = check()
        except Exception as error:  # noqa: BLE001  # whatever the machine does to a check is what it found
            verdict, found, advice = Verdict.FAIL, f"{type(error).__name__}: {error}", "mend what the message names"
        yield Finding(check=name, verdict=verdict, found=found, advice=advice)


def _python() -> Answer:
    found = f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}"
    old = sys.version_info < _MIN_PYTHON
    return (Verdict.FAIL if old else Verdict.OK), found, "install Python 3.11 or later" if old else ""


def _cores() -> Answer:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Verdict.NOTE, f"{cores}", "rollout and training take turns on one core: nothing can overlap"
    return Verdict.OK, f"{cores}", ""


def _threads() -> Answer:
    """Two processes compute; each has the threads its option says, but what OpenMP is told counts for others."""
    told = os.environ.get("OMP_NUM_THREADS")
    if told is None and len(os.sched_getaffinity(0)) <= 2:
        return Verdict.NOTE, "OMP_NUM_THREADS is not set", "on few cores: export OMP_NUM_THREADS=1"
    return Verdict.OK, f"OMP_NUM_THREADS = {told or 'not set'}", ""


def _memory() -> Answer:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _room(total, _MIN_MEMORY_BYTES, "a tiny model needs about 2 GB, one of 135 M parameters about 6 GB")


def _disk(folder: Path) -> Answer:
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    verdict, found, advice = _room(
        shutil.disk_usage(existing).free, _MIN_DISK_BYTES, "make room, or set runs_dir to another disk"
    )
    return verdict, f"{found} free in {existing}", advice


def _shared_memory() -> Answer:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Verdict.NOTE, "no /dev/shm", "weights travel through the run's folder: slower, nothing else"
    advice = "enlarge it (in a container: --shm-size), or set sync.transport = 'disk'"
    verdict, found, advice = _room(shutil.disk_usage(place).free, _MIN_SHARED_BYTES, advice)
    return verdict, f"{found} free in {place}", advice


def _loopback() -> Answer:
    with socket.socket() as listener, socket.socket() as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.settimeout(_CONNECT_S)
        caller.connect(listener.getsockname())
        return Verdict.OK, f"port {listener.getsockname()[1]} on 127.0.0.1 can be reached", ""


def _torch() -> Answer:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU alone"
    return Verdict.OK, f"{torch.__version__}, {device}, {torch.get_num_threads()} threads", ""


def _extra(extra: str) -> Answer:
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        return Verdict.NOTE, "not installed", f"if you need it: pip install 'fathom-rl[{extra}]'"
    return Verdict.OK, "installed", ""


def _gold(kind: str) -> Answer:
    """The grader of a built-in environment must give the gold answers 1.0."""
    if kind == "harbor":
        return _terminal_tasks()
    if kind in _ACTED:
        return Verdict.NOTE, "not checked: an agent acts in it", ""
    if kind == "reasoning_gym" and find_spec("reasoning_gym") is None:
        return Verdict.NOTE, "not checked: its extra is not installed", ""
    with tempfile.TemporaryDirectory() as scratch:
        environment = build_environment(kind, _gold_options(kind, Path(scratch)))
        if not isinstance(environment, Environment):
            return Verdict.NOTE, "not checked: an agent acts in it", ""
        report = check_environment(environment, _GOLD_TASKS)
    if report.faults or not report.checked:
        return Verdict.FAIL, "; ".join(report.faults[:3]) or "nothing was graded", "reinstall fathom-rl with its pins"
    return Verdict.OK, f"{report.checked} of {report.checked} got 1.0", ""


def _terminal_tasks() -> Answer:
    """In a sandbox, the solution of a generated task must get 1, and nothing 0."""
    if shutil.which("bwrap") is None:
        return Verdict.NOTE, "not checked: bubblewrap is not installed", ""
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(Path(scratch), seed=0, count=_SANDBOXED_TASKS, held_out=0)
        rows = asyncio.run(check_folders(task_folders([Path(scratch) / "train"])))
    faults = [row.reason for row in rows if not row.admitted]
    if faults:
        return Verdict.NOTE, f"no sandboxes: {faults[0]}", "needed only by tasks with a sandbox, as `harbor`"
    return Verdict.OK, f"{len(rows)} of {len(rows)} tasks solved in a sandbox", ""


def _gold_options(kind: str, scratch: Path) -> dict[str, JsonValue]:
    """Options of a small instance of a built-in environment."""
    if kind == "reasoning_gym":
        return {"dataset": "chain_sum", "size": _GOLD_TASKS}
    if kind == "rows":
        file = scratch / "rows.jsonl"
        rows = (
            {"question": f"What is half of {2 * n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(_GOLD_TASKS)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {"path": str(file)}
    return {"num_train": _GOLD_TASKS, "num_eval": _GOLD_TASKS}


def _engine_and_trainer() -> Answer:
    """A real engine process serves a tiny model, and agrees with the trainer token by token."""
    from fathom.bench.workloads.probe import probe

    options = ProbeOptions(tokens=_PROBE_TOKENS)
    (target,) = probe(options, lambda _: None).targets
    found = (
        f"an engine starts and serves; {target.claim} in float32: {target.measured:.1e} (at most {target.limit:.0e})"
    )
    if not target.met:
        return Verdict.FAIL, found, "do not train on this machine before `fathom bench probe` has been understood"
    return Verdict.OK, found, ""


def _room(given_bytes: float, needed_bytes: float, advice: str) -> Answer:
    found = f"{given_bytes / 1e9:.1f} GB"
    return (Verdict.OK, found, "") if given_bytes >= needed_bytes else (Verdict.FAIL, found, advice)
