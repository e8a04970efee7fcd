"""Small runs: their config, their start in a process of its own that can be killed, and what must hold afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from fathom import Run
from fathom.config.load import load_config
from fathom.config.run import RunConfig
from fathom.core.errors import LedgerError
from fathom.evidence.contracts.audit import audit
from fathom.ledger.events import Event, IncarnationOpened, StepTaken
from fathom.ledger.reader import LedgerReader

SMALL = """
name = "small"
[model]
tiny = "arithmetic"
[task]
kind = "digits:Digits"
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 8
max_prompt_tokens = 24
[engine]
max_running = 16
[trainer]
steps = 6
groups_per_step = 2
[trainer.optimizer]
lr = 1e-3
[checkpoint]
every_steps = 2
"""
SCRIPTED = "engine.kind=scripted"
ENGINES = [SCRIPTED, pytest.param("engine.kind=embedded", marks=pytest.mark.slow)]
DETERMINISTIC = ("deterministic=true", "staleness.max_staleness=0")

_MARK = "FATHOM_TEST_RUN"
_PROC = Path("/proc")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fathom.run.local"])  # torch is imported once for all processes that are killed


def small_config(tmp_path: Path, *overrides: str) -> RunConfig:
    """The small config with overrides; its runs are kept in `tmp_path/runs`."""
    return load_config(small_file(tmp_path), [f'runs_dir="{tmp_path / "runs"}"', *overrides])


def small_file(tmp_path: Path) -> Path:
    """The small config as a file."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def digests(run: Path) -> dict[int, str]:
    """Digest of the weights after each step of the surviving lineage; every one must be there once."""
    with LedgerReader(run / "ledger") as reader:
        steps = [entry.event for entry in reader.events(StepTaken)]
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    return {step.number: step.weights_digest for step in steps}


def require_sound(run: Path) -> None:
    """Every contract holds, the books balance, and nothing was trained twice on the surviving lineage."""
    with LedgerReader(run / "ledger") as reader:
        report = audit(reader)
        assert report.passed, [check for check in report.checks if not check.passed]
        trained = [use.trajectory for use in reader.rows()]
        assert len(trained) == len(set(trained))


def incarnations(run: Path) -> int:
    """How often the run was started."""
    with LedgerReader(run / "ledger") as reader:
        return len(reader.events(IncarnationOpened, include_undone=True))


class RunProcess:
    """A run, fresh or resumed, in a process group of its own; all it starts carries a mark by which it is found."""

    def __init__(
        self,
        config: RunConfig,
        run: Path | None = None,
        *,
        kill_after: tuple[type, int] | None = None,
        kill_after_s: float | None = None,
    ) -> None:
        """Start it. After so many events of a kind, or so many seconds, `kill -9` strikes its whole group."""
        self.runs = Path(config.runs_dir)
        self._known = set(self.runs.glob("*"))
        self._run = run
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        text = config.model_dump_json(exclude_unset=True)
        self.process: ForkServerProcess = _CONTEXT.Process(
            target=_play, args=(text, run, self._mark, kill_after, kill_after_s)
        )
        self.process.start()

    @property
    def run(self) -> Path | None:
        """The run's folder. None: not yet made."""
        return self._run or next(iter(set(self.runs.glob("*")) - self._known), None)

    def wait_for(self, kind: type[Event], within_s: float = 60.0) -> Path:
        """Wait until this incarnation has committed an event of a kind; returns the run's folder."""
        deadline = time.monotonic() + within_s
        while self.run is None or not _newest_incarnation_has(self.run, kind):
            assert time.monotonic() < deadline, f"no {kind.__name__}"
            assert self.process.is_alive(), f"it ended with {self.process.exitcode}"
            time.sleep(0.01)
        return self.run

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to it alone or, as a terminal does, to its whole group."""
        assert self.process.pid is not None
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, within_s: float = 60.0, gone_s: float = 5.0) -> int:
        """The exit code, after everything it had started is gone too, within another `gone_s`."""
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"it runs after {within_s} s"
        require_gone(self._mark, gone_s)
        return self.process.exitcode


def marked(mark: str) -> dict[str, str]:
    """The environment of a process whose descendants `require_gone` is to find."""
    return {**os.environ, _MARK: mark}


def require_gone(mark: str, within_s: float = 5.0) -> None:
    """No process that carries the mark is left after a moment."""
    deadline = time.monotonic() + within_s
    while left := carriers(mark):
        assert time.monotonic() < deadline, [command_of(pid) for pid in left]
        time.sleep(0.02)


def carriers(mark: str) -> list[int]:
    """Processes that carry the mark; zombies have no environment."""
    return [int(path.parent.name) for path in _PROC.glob("[0-9]*/environ") if f"{_MARK}={mark}".encode() in _read(path)]


def command_of(pid: int) -> str:
    """Command line of a process."""
    return _read(_PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode()


def engine_below(pid: int) -> int | None:
    """Process id of the engine that process `pid` has started."""
    for path in _PROC.glob("[0-9]*/stat"):
        fields = _read(path).rpartition(b")")[2].split()
        child = int(path.parent.name)
        if len(fields) > 1 and int(fields[1]) == pid and "engines.embedded.server" in command_of(child):
            return child
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _newest_incarnation_has(run: Path, kind: type[Event]) -> bool:
    try:
        with LedgerReader(run / "ledger") as reader:
            opened = reader.latest(IncarnationOpened, include_undone=True)
            newest = reader.latest(kind, include_undone=True)
    except LedgerError:
        return False
    return opened is not None and newest is not None and newest.seq > opened.seq


def _play(
    config: str,
    run: Path | None,
    mark: str,
    kill_after: tuple[type, int] | None,
    kill_after_s: float | None,
) -> None:
    os.setsid()
    os.environ[_MARK] = mark
    if kill_after_s is not None:
        timer = threading.Timer(kill_after_s, _kill_the_group)
        timer.daemon = True
        timer.start()
    observers = [_killer(*kill_after)] if kill_after else []
    started = Run.resume(run) if run else Run(RunConfig.model_validate_json(config))
    sys.exit(started.start(observers).exit_code)


def _killer(kind: type, count: int) -> Callable[[Event], None]:
    left = count

    def observe(event: Event) -> None:
        nonlocal left
        left -= isinstance(event, kind)
        if left <= 0:
            _kill_the_group()

    return observe


def _kill_the_group() -> None:
    os.killpg(0, signal.SIGKILL)
