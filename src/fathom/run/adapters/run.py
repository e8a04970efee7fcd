"""A run that trains several adapters over one base, for people: from a file or from Python, fresh or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, final

from fathom.config.load import load_config
from fathom.config.run import RunConfig
from fathom.core.errors import RunStoppedError
from fathom.envs.registry import AnyEnvironment
from fathom.run.adapters.configs import resolve_each
from fathom.run.history.folder import RunFolder
from fathom.run.history.past import ended_as_asked
from fathom.run.history.recorder import Observer
from fathom.run.resolve import Resolved
from fathom.run.rollouts.players import players_for
from fathom.run.run import RunResult, require_startable
from fathom.run.stop import Stop

_NO_ENVIRONMENTS: Mapping[str, AnyEnvironment] = {}
_NOBODY: Mapping[str, Sequence[Observer]] = {}


@final
class AdaptersRun:
    """One run of several adapters, checked and ready to start.

        run = fathom.AdaptersRun.from_toml(Path("adapters.toml"))
        result = run.start()

    Each adapter is a run of its own, in `adapters/NAME` of the run's folder.
    """

    def __init__(self, config: RunConfig, *, environments: Mapping[str, AnyEnvironment] = _NO_ENVIRONMENTS) -> None:
        """Resolve `config`. `environments`: objects that take the place of `task.kind`, by the adapter's name.

        Raises ConfigError when the run cannot start; nothing heavy is loaded.
        """
        self.config = config
        self.resolved: Mapping[str, Resolved] = resolve_each(config, environments)
        self._folder: RunFolder | None = None

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """A run from a file and `key=value` overrides. Raises ConfigError."""
        return cls(load_config(path, overrides))

    @classmethod
    def resume(cls, folder: Path, *, environments: Mapping[str, AnyEnvironment] = _NO_ENVIRONMENTS) -> Self:
        """Go on with the run in `folder`, each adapter from its newest checkpoint, as the run's `config.json` says.

        Raises:
            ConfigError: it is no such run's folder, is in use, or cannot go on as configured.
        """
        opened = RunFolder.open(folder)
        try:
            run = cls(opened.config(), environments=environments)
        except BaseException:
            opened.unlock()
            raise
        run._folder = opened
        return run

    def start(self, observers: Mapping[str, Sequence[Observer]] = _NOBODY) -> RunResult:
        """Run every adapter to its end; those that have come to it, and whose config is still the same, stay as they
        are. The reason is `stopped` if one was, else `data` if one ended so, else `steps`.

        `observers` see every event of their adapter as it is recorded.

        Raises:
            ConfigError: the machine refuses something after all; a fresh run leaves no folder then.
            FathomError: a component died; what was reported until then is kept, and `resume` goes on from there.
        """
        require_startable()
        folder = self._folder or RunFolder.create(self.config)
        with ExitStack() as locked:
            folder.lock()
            locked.callback(folder.unlock)
            if self._folder is None:
                locked.callback(folder.remove_if_unused)
            folders: dict[str, RunFolder] = {}
            for name, resolved in self.resolved.items():
                folders[name] = folder.of_adapter(name, resolved.config)
                locked.callback(folders[name].unlock)
            return asyncio.run(self._main(folder, folders, observers))

    async def _main(
        self, folder: RunFolder, folders: Mapping[str, RunFolder], observers: Mapping[str, Sequence[Observer]]
    ) -> RunResult:
        before = {name: ended_as_asked(folders[name], each.config) for name, each in self.resolved.items()}
        going = [name for name, reason in before.items() if not reason]
        players = {name: players_for(self.resolved[name]) for name in going}
        stop = Stop()
        stop.listen()
        try:
            async with stop.cancels():
                for each in players.values():
                    await each.start()
            from fathom.run.adapters.drive import Lane, drive_each  # the heavy half: after the players have started

            await stop.heard()
            lanes = {
                name: Lane(
                    resolved=self.resolved[name],
                    folder=folders[name],
                    players=players[name],
                    observers=tuple(observers.get(name, ())),
                )
                for name in going
            }
            ended = await drive_each(self.config, folder, lanes, stop) if lanes else {}
        except RunStoppedError:
            ended = dict.fromkeys(going, "stopped")
        finally:
            await asyncio.gather(*(each.close() for each in players.values()))
        reasons = {*before.values(), *ended.values()}
        reason = next(each for each in ("stopped", "data", "steps") if each in reasons)
        return RunResult(folder=folder.path, reason=reason, exit_code=stop.exit_code)


def adapters_in(folder: Path) -> bool:
    """Whether a folder is that of a run of several adapters. Raises ConfigError: it is no run's."""
    return bool(RunFolder(folder).config_tree().get("adapters"))
