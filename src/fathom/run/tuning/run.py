"""A run that tunes, for people: from a file or from Python, fresh or resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

from fathom.core.errors import RunStoppedError
from fathom.run.history.folder import RunFolder
from fathom.run.history.past import ended_as_asked
from fathom.run.history.recorder import Observer
from fathom.run.run import RunResult
from fathom.run.stop import Stop
from fathom.run.tuning.plan import KINDS, TuningPlan, parse_tuning, plan_from_toml, plan_of
from fathom.run.tuning.prepare import TuningConfig


def kind_of(folder: Path) -> str:
    """`sft` or `dpo` where a folder is such a run's. Empty: it is another's. Raises ConfigError: it is no run's."""
    found = str(RunFolder(folder).config_tree().get("kind", ""))
    return found if found in KINDS else ""


@final
class TuningRun:
    """One run of supervised fine-tuning or of preference training, checked and ready to start."""

    def __init__(self, plan: TuningPlan) -> None:
        """See `of`, `from_toml`."""
        self.plan = plan
        self._folder: RunFolder | None = None

    @classmethod
    def of(cls, config: TuningConfig) -> Self:
        """Read and render its rows. Raises ConfigError when the run cannot start; nothing heavy is loaded."""
        return cls(plan_of(config))

    @classmethod
    def from_toml(cls, kind: str, path: Path, overrides: Sequence[str] = ()) -> Self:
        """A run of a kind (`sft`, `dpo`) from a file and `key=value` overrides. Raises ConfigError."""
        return cls(plan_from_toml(kind, path, overrides))

    @classmethod
    def resume(cls, folder: Path) -> Self:
        """Go on with the run in `folder` from its newest checkpoint, as its `config.json` says.

        Raises:
            ConfigError: it is no such run's folder, is in use, or cannot go on as configured.
        """
        opened = RunFolder.open(folder)
        try:
            tree = opened.config_tree()
            run = cls.of(parse_tuning(tree, str(opened.config_file), str(tree.get("kind", ""))))
        except BaseException:
            opened.unlock()
            raise
        run._folder = opened
        return run

    def start(self, observers: Sequence[Observer] = ()) -> RunResult:
        """Run to the end; one that has come to its end, and whose config is still the same, ends at once.

        Raises:
            ConfigError: the machine refuses something after all; a fresh run leaves no folder then.
            FathomError: it failed; what was reported until then is kept, and `resume` goes on from there.
        """
        folder = self._folder or RunFolder.create(self.plan.config)
        folder.lock()
        try:
            if reason := ended_as_asked(folder, self.plan.config):
                return RunResult(folder=folder.path, reason=reason, exit_code=0)
            return asyncio.run(self._main(folder, tuple(observers)))
        finally:
            if self._folder is None:
                folder.remove_if_unused()
            folder.unlock()

    async def _main(self, folder: RunFolder, observers: tuple[Observer, ...]) -> RunResult:
        stop = Stop()
        stop.listen()
        try:
            from fathom.run.tuning.drive import drive  # the heavy half

            await stop.heard()
            reason = await drive(self.plan, folder, stop, observers)
        except RunStoppedError:
            reason = "stopped"
        return RunResult(folder=folder.path, reason=reason, exit_code=stop.exit_code)
