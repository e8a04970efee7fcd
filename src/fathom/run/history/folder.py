"""Where a run lives on disk, and the lock that keeps two processes from writing it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, final

from fathom.config.load import parse_config
from fathom.config.run import RunConfig
from fathom.config.tuning.preference import PreferenceConfig
from fathom.config.tuning.supervised import SupervisedConfig
from fathom.core.errors import ConfigError
from fathom.ledger.schema import DATABASE
from fathom.text.tokenizer import TOKENIZER_FILES

RootConfig = RunConfig | SupervisedConfig | PreferenceConfig
"""What a run of any kind is configured by."""


@final
class RunFolder:
    """Paths of one run: config, ledger, checkpoints, logs, tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.ledger = path / "ledger"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"
        self.tokenizer = path / "tokenizer"
        self.trained = path / "trained"
        self.adapters = path / "adapters"
        self._lock: int | None = None

    @classmethod
    def create(cls, config: RootConfig) -> RunFolder:
        """Make a new folder `runs_dir/name-YYYYmmdd-HHMMSS` with the resolved config in it, and lock it.

        Raises:
            ConfigError: the folder cannot be written.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = Path(config.runs_dir) / f"{config.name}-{stamp}"
        for attempt in range(100):
            path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"runs_dir {config.runs_dir!r} cannot be written ({error}); set another") from None
            folder = cls(path)
            folder._furnish(config)
            folder.lock()
            return folder
        raise ConfigError(f"no free folder name like {base}; remove old runs or choose another name")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run's folder, locked for this process. Raises ConfigError when it is none or is in use."""
        folder = cls(path)
        if not folder.config_file.is_file():
            raise ConfigError(f"{path} is not a run's folder (no config.json in it)")
        folder.lock()
        return folder

    def of_adapter(self, name: str, config: RunConfig) -> RunFolder:
        """The folder of one of the run's adapters, made if there is none, locked: that of a run by itself.

        Its config becomes what the run's own says of it.

        Raises:
            ConfigError: it is in use, or cannot be written.
        """
        folder = RunFolder(self.adapters / name)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            folder._furnish(config)
        except OSError as error:
            folder.unlock()
            raise ConfigError(f"{folder.path} cannot be written ({error}); make it writable, or start anew") from None
        return folder

    def _furnish(self, config: RootConfig) -> None:
        for part in (self.ledger, self.checkpoints, self.logs):
            part.mkdir(exist_ok=True)
        self.config_file.write_text(config.model_dump_json(indent=2, exclude_unset=True), encoding="utf-8")

    def config(self) -> RunConfig:
        """The config the run was started with, or what a person made of it since. Raises ConfigError."""
        return parse_config(self.config_tree(), str(self.config_file))

    def config_tree(self) -> dict[str, Any]:
        """The same as plain values, of a run of any kind. Raises ConfigError."""
        try:
            tree = json.loads(self.config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.config_file} is not valid JSON: {error}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{self.config_file} must hold a JSON object")
        return tree

    def lock(self) -> None:
        """Hold the run for this process; the kernel lets go when the process ends, however it ends. Idempotent."""
        if self._lock is not None:
            return
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(f"{self.path} is in use by another process; stop it first") from None
        self._lock = handle

    def unlock(self) -> None:
        """Let go of the run. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_if_unused(self) -> None:
        """Remove the folder of a run that never came to its history: nothing in it is of use."""
        if not any(each.has_history for each in (self, *map(RunFolder, self.adapters.glob("*")))):
            shutil.rmtree(self.path)

    @property
    def has_history(self) -> bool:
        """True once a ledger was started in it."""
        return (self.ledger / DATABASE).exists()

    def keep_tokenizer(self, source: Path) -> None:
        """Copy the tokenizer's files from a model folder, so that the run's tokens can be read for ever."""
        self.tokenizer.mkdir(exist_ok=True)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.tokenizer / name)
