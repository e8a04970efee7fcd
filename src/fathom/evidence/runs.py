"""Finds runs on disk and says how each stands."""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from fathom.core.errors import ConfigError, LedgerError
from fathom.evidence.run_state import RunPhase, RunState, state_of
from fathom.ledger.events import IncarnationOpened
from fathom.ledger.reader import LedgerReader

_ADAPTERS = "adapters"
_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """One run among others."""

    name: str
    """Its folder's name."""
    path: str
    """Its folder."""
    state: str
    """`running`, `ended: reason`, `stopped` (killed; it can be resumed), `empty`, or `unreadable: why`."""
    step: int
    """Optimizer steps taken."""
    steps: int | None
    """Steps it was asked for. None: its config cannot be read."""
    reward_mean: float | None
    """Mean reward of the newest step. None: none."""
    started_s: float | None
    """Wall-clock time it started. None: never."""


def ledger_of(run: Path) -> Path:
    """Folder of a run's ledger."""
    return run / "ledger"


def tokenizer_of(run: Path) -> Path | None:
    """Folder with the tokenizer that a run used. None: the run has not got as far as keeping it."""
    return run / "tokenizer" if (run / "tokenizer" / "tokenizer.json").is_file() else None


def adapters_of(run: Path) -> dict[str, Path]:
    """Folders of a run's adapters by their names, each that of a run. Empty: the run is one by itself."""
    return {path.parent.name: path.parent for path in sorted((run / _ADAPTERS).glob("*/config.json"))}


def list_runs(runs_dir: Path) -> list[RunListing]:
    """All runs in a folder, newest first; each adapter of a run of several by itself, after the run.

    Raises:
        ConfigError: it is a file.
    """
    if runs_dir.is_file():
        raise ConfigError(f"{runs_dir} is a file; --runs-dir takes the folder that runs are in")
    runs = sorted(
        (describe_run(path) for path in _folders(runs_dir)), key=lambda run: run.started_s or 0.0, reverse=True
    )
    return [listing for run in runs for listing in (run, *_adapters(run))]


def _adapters(run: RunListing) -> list[RunListing]:
    listings = {name: describe_run(path) for name, path in adapters_of(Path(run.path)).items()}
    return [replace(listing, name=f"{run.name}/{name}") for name, listing in listings.items()]


def describe_run(path: Path) -> RunListing:
    """How the run in a folder stands. Never fails: a ledger that cannot be read is a state too.

    A run of several adapters stands as all of them together.
    """
    if adapters := adapters_of(path):
        return _together(path, [describe_run(each) for each in adapters.values()])
    state, opened = RunState(phase=RunPhase.EMPTY, reason="", step=0, reward_mean=None), None
    fault = ""
    try:
        with LedgerReader(ledger_of(path)) as reader:
            state = state_of(reader)
            opened = reader.latest(IncarnationOpened, until=1)
    except LedgerError as error:
        if any(ledger_of(path).glob("*.sqlite")):
            fault = f"unreadable: {error}"
    return RunListing(
        name=path.name,
        path=str(path),
        state=fault or _words(state, held=_is_held(path / "lock")),
        step=state.step,
        steps=_planned_steps(path),
        reward_mean=state.reward_mean,
        started_s=opened.at_s if opened else None,
    )


def find_run(run: str, runs_dir: Path, *, or_tuned: bool = False) -> Path:
    """The run that a person means, with trajectories and versions in a ledger of its own; see `find_folder`.

    `or_tuned`: one that learnt from files will do, too.

    Raises:
        ConfigError: there is none, or several adapters are meant; the message names the nearest, or all of them. Or
            it learnt from files, and has neither trajectories nor versions.
    """
    folder = find_folder(run, runs_dir)
    if adapters := adapters_of(folder):
        raise ConfigError(
            f"{folder.name} trained several adapters, each with a history of its own; name one of "
            f"{', '.join(f'{run}/{name}' for name in adapters)}"
        )
    if not or_tuned and (kind := _tuning_kind(folder)):
        raise ConfigError(
            f"{folder.name} is a run of fathom {kind}, which has no trajectories, engines or chain of versions; look "
            f"at it with: fathom show {folder}"
        )
    return folder


def find_folder(run: str, runs_dir: Path) -> Path:
    """The run that a person means: a folder, a folder's name in `runs_dir`, or a run's name (its newest folder).

    An adapter of a run of several is named `RUN/NAME`.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if (Path(run) / "config.json").is_file():
        return Path(run)
    of, _, name = run.rpartition("/")
    named = bool(of) and ("/" not in of or (Path(of) / "config.json").is_file())
    if named and name in (adapters := adapters_of(find_folder(of, runs_dir))):
        return adapters[name]
    folders = _folders(runs_dir)
    matching = [folder for folder in folders if run in (folder.name, _STAMP.sub("", folder.name))]
    if matching:
        return max(matching, key=lambda folder: (folder.name == run, folder.name))
    names = {known: folder for folder in folders for known in (folder.name, _STAMP.sub("", folder.name))}
    near = difflib.get_close_matches(run, names, n=3, cutoff=0.5)
    if near:
        raise ConfigError(f"there is no run {run!r} in {runs_dir}; did you mean {', '.join(near)}?")
    known = ", ".join(sorted({_STAMP.sub("", folder.name) for folder in folders})) or "none"
    raise ConfigError(f"there is no run {run!r} in {runs_dir} (runs there: {known}); give a folder or set --runs-dir")


def is_running(path: Path) -> bool:
    """True while a process runs the run in this folder."""
    return _is_held(path / "lock")


def require_running(path: Path) -> None:
    """Raise ConfigError unless a process runs the run in this folder."""
    if not is_running(path):
        raise ConfigError(f"{path.name} is not running; start it again with: fathom resume {path}")


def _together(path: Path, adapters: list[RunListing]) -> RunListing:
    """Of several adapters: steps are summed, and what has not ended for one has not ended."""
    states = {listing.state for listing in adapters}
    going = "stopped" if any(listing.step for listing in adapters) else "empty"
    state = "running" if is_running(path) else states.pop() if len(states) == 1 else going
    planned = [listing.steps for listing in adapters if listing.steps is not None]
    return RunListing(
        name=path.name,
        path=str(path),
        state=state,
        step=sum(listing.step for listing in adapters),
        steps=sum(planned) if len(planned) == len(adapters) else None,
        reward_mean=None,
        started_s=min((listing.started_s for listing in adapters if listing.started_s is not None), default=None),
    )


def _folders(runs_dir: Path) -> list[Path]:
    return sorted(path.parent for path in runs_dir.glob("*/config.json"))


def _words(state: RunState, *, held: bool) -> str:
    if held:
        return "running"
    match state.phase:
        case RunPhase.ENDED:
            return f"ended: {state.reason}"
        case RunPhase.OPEN:
            return "stopped"
        case RunPhase.EMPTY:
            return "empty"


def _tuning_kind(path: Path) -> str:
    """`sft` or `dpo`. Empty: it is a run of fathom train, or its config cannot be read."""
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("kind", "")
    except (OSError, ValueError, AttributeError):
        return ""
    return kind if isinstance(kind, str) else ""


def _planned_steps(path: Path) -> int | None:
    try:
        return int(json.loads((path / "config.json").read_text(encoding="utf-8"))["trainer"]["steps"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_held(lock: Path) -> bool:
    """True while a process holds the run's lock."""
    if not lock.is_file():
        return False
    handle = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
