"""Checkpoints: a folder that is whole or absent, from which a run goes on as if nothing had happened.

checkpoints/step-000010/state.msgpack   where the loop stood: books, buffer, data cursor, place in the ledger
checkpoints/step-000010/trainer/...     weights (Hugging Face layout), float32 masters, optimizer
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar, final

import msgspec
from safetensors import SafetensorError

from fathom.buffer.group_buffer import BufferState
from fathom.core.errors import CheckpointError

_NAME = re.compile(r"step-\d+")
_UNFINISHED = ".unfinished-"
_STATE = "state.msgpack"
_TRAINER = "trainer"


class LoopState(msgspec.Struct, frozen=True, tag="loop_state.1"):
    """Where the loop stood between two batches. Random numbers need no state: all seeds are derived."""

    ledger_seq: int
    """Last event of the history that this state is the result of."""
    buffer: BufferState
    """Clock, data order, books and the groups that wait; their records are in the ledger."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.buffer.version


class State(Protocol):
    """Where a loop stood; a msgspec record."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...


S = TypeVar("S", bound=State)


@final
class Checkpoints(Generic[S]):
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, state: type[S], *, keep: int, fsync: bool) -> None:
        """`state`: what of the loop they hold, read back as just this type."""
        self._folder = folder
        self._state = state
        self._keep = keep
        self._fsync = fsync

    def save(self, state: S, save_trainer: Callable[[Path], None]) -> Path:
        """Write one under a temporary name, then give it its name at once. Older ones beyond `keep` go away.

        Raises:
            CheckpointError: it cannot be written; those there stay.
        """
        final_path = self._folder / f"step-{state.step:06d}"
        if final_path.exists():
            return final_path  # the same step in an earlier incarnation wrote the same state
        try:
            self._write(state, save_trainer, final_path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint {final_path} cannot be written ({error}); make room, then resume from the one before"
            ) from error
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old.rename(self._folder / f"{_UNFINISHED}{old.name}"))
        return final_path

    @property
    def newest_step(self) -> int:
        """Optimizer steps behind the newest one; 0 when there is none."""
        found = self._all()
        return _step(found[-1]) if found else 0

    def newest(self) -> tuple[S, Path] | None:
        """The newest one: its state, and the folder that the trainer wrote. None: there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        for leftover in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        found = self._all()
        if not found:
            return None
        try:
            state = msgspec.msgpack.decode((found[-1] / _STATE).read_bytes(), type=self._state)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"checkpoint {found[-1]} cannot be read ({error}); remove that folder to go on from the one before"
            ) from None
        return state, found[-1] / _TRAINER

    def _write(self, state: S, save_trainer: Callable[[Path], None], final_path: Path) -> None:
        unfinished = self._folder / f"{_UNFINISHED}{final_path.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / _TRAINER).mkdir(parents=True)
        save_trainer(unfinished / _TRAINER)
        (unfinished / _STATE).write_bytes(msgspec.msgpack.encode(state))
        if self._fsync:
            _sync_tree(unfinished)
        unfinished.rename(final_path)
        if self._fsync:
            _sync(self._folder)

    def _all(self) -> list[Path]:
        return sorted((path for path in self._folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
