"""A run, for people: from a file or from Python, fresh or resumed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from fathom.config.load import load_config
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError, RunStoppedError
from fathom.envs.registry import AnyEnvironment
from fathom.rollout.engines.registry import Launcher
from fathom.run.history.folder import RunFolder
from fathom.run.history.past import ended_as_asked
from fathom.run.history.recorder import Observer
from fathom.run.resolve import Resolved, resolve
from fathom.run.rollouts.players import players_for
from fathom.run.stop import Stop


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    """Its folder: ledger, checkpoints, logs. `fathom show` reads it. Gone when it was stopped before it recorded."""
    reason: str
    """`steps`, `data` or `stopped`."""
    exit_code: int
    """What a process that did only this should exit with."""


@final
class Run:
    """One run, checked and ready to start.

        run = fathom.Run.from_toml(Path("run.toml"), ["trainer.steps=20"])
        result = run.start()

    A class of your own may take the place of `task.kind`:

        run = fathom.Run(config, environment=Riddles())
    """

    def __init__(self, config: RunConfig, *, environment: AnyEnvironment | None = None) -> None:
        """Resolve `config`. Raises ConfigError when the run cannot start; nothing heavy is loaded."""
        self.resolved: Resolved = resolve(config, environment)
        self._folder: RunFolder | None = None

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = (), *, environment: AnyEnvironment | None = None) -> Self:
        """A run from a file and `key=value` overrides. Raises ConfigError."""
        return cls(load_config(path, overrides), environment=environment)

    @classmethod
    def resume(cls, folder: Path, *, environment: AnyEnvironment | None = None) -> Self:
        """Go on with the run in `folder` from its newest checkpoint, as its `config.json` says.

        An edited `config.json` holds from here on (to raise `trainer.steps`, for one) and is recorded with the new
        incarnation; what would make the checkpoint meaningless, another seed or other tasks, is refused.

        Raises:
            ConfigError: it is no run's folder, is in use, or cannot go on as configured.
        """
        opened = RunFolder.open(folder)
        try:
            run = cls(opened.config(), environment=environment)
        except BaseException:
            opened.unlock()
            raise
        run._folder = opened
        return run

    def start(self, observers: Sequence[Observer] = (), *, launcher: Launcher | None = None) -> RunResult:
        """Run to the end; one that has come to its end, and whose config is still the same, ends at once.

        `observers` see every event as it is recorded. `launcher` starts engines of your own in place of `engine.kind`.

        Raises:
            ConfigError: the machine refuses something after all; a fresh run leaves no folder then.
            FathomError: a component died; what was reported until then is kept, and `resume` goes on from there.
        """
        require_startable()
        folder = self._folder or RunFolder.create(self.resolved.config)
        folder.lock()
        try:
            if reason := ended_as_asked(folder, self.resolved.config):
                return RunResult(folder=folder.path, reason=reason, exit_code=0)
            return asyncio.run(self._main(folder, tuple(observers), launcher))
        finally:
            if self._folder is None:
                folder.remove_if_unused()
            folder.unlock()

    async def _main(self, folder: RunFolder, observers: tuple[Observer, ...], launcher: Launcher | None) -> RunResult:
        stop = Stop()
        stop.listen()
        players = players_for(self.resolved)
        try:
            async with stop.cancels():
                await players.start()
            from fathom.run.local import drive  # the heavy half: after the players have started

            await stop.heard()
            reason = await drive(self.resolved, folder, players, stop, observers, launcher)
        except RunStoppedError:
            reason = "stopped"
        finally:
            await players.close()
        return RunResult(folder=folder.path, reason=reason, exit_code=stop.exit_code)


def require_startable() -> None:
    """Raise ConfigError where no run can be started: within an event loop, or by a main module that is no file."""
    _require_importable_main()
    _require_no_loop()


def _require_no_loop() -> None:
    """A run has an event loop of its own."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError(
            "a run cannot be started within a running event loop, as in a notebook; use "
            "`await asyncio.to_thread(run.start)`, or start it from a script"
        )


def _require_importable_main() -> None:
    """Graders start as fresh processes that import the main module, so it must be a file, if it is anything."""
    path = vars(sys.modules["__main__"]).get("__file__")
    if path is not None and not Path(path).exists():
        raise ConfigError(
            "a run cannot be started by a script from standard input: its graders are processes of their own, which "
            "import the script; save it as a file and put the start under `if __name__ == '__main__':`"
        )
