"""A run's folder and its checkpoints: whole or absent, and one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import small_config

from fathom.buffer.books import Books
from fathom.buffer.buffer_state import BufferState
from fathom.buffer.source import SourceState
from fathom.core.errors import CheckpointError, ConfigError
from fathom.run.history.checkpoint import Checkpoints, LoopState
from fathom.run.history.folder import RunFolder


def state(step: int, ledger_seq: int = 7) -> LoopState:
    source = SourceState(num_tasks=3, seed=0, shuffle=True)
    buffer = BufferState(version=step, source=source, books=Books().snapshot(), held=())
    return LoopState(ledger_seq=ledger_seq, buffer=buffer)


def weights(folder: Path) -> None:
    (folder / "weights").write_text("all of them")


def disk_full(folder: Path) -> None:
    weights(folder)
    raise OSError("no space left")


def test_the_newest_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LoopState, keep=2, fsync=True)
    assert checkpoints.newest() is None
    assert checkpoints.newest_step == 0
    for step in (2, 4, 999_999, 1_000_000):
        checkpoints.save(state(step), weights)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0] == state(1_000_000)
    assert (newest[1] / "weights").read_text() == "all of them"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_one_that_was_not_finished_does_not_exist(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LoopState, keep=2, fsync=False)
    checkpoints.save(state(2), weights)
    with pytest.raises(CheckpointError, match=r"no space left.*make room"):
        checkpoints.save(state(4), disk_full)
    assert any(tmp_path.glob(".unfinished-*"))
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0].step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_the_same_step_is_kept_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LoopState, keep=2, fsync=False)
    checkpoints.save(state(2, ledger_seq=7), weights)
    checkpoints.save(state(2, ledger_seq=9), disk_full)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0].ledger_seq == 7


@pytest.mark.parametrize("damage", [b"", b"\x00", b"\x81\xa4type\xa1x"])
def test_a_damaged_one_is_named(tmp_path: Path, damage: bytes) -> None:
    checkpoints = Checkpoints(tmp_path, LoopState, keep=2, fsync=False)
    path = checkpoints.save(state(2), weights)
    (path / "state.msgpack").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"step-000002.*remove that folder"):
        checkpoints.newest()


def test_strangers_among_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-of-mine").mkdir()
    assert Checkpoints(tmp_path, LoopState, keep=1, fsync=False).newest() is None
    assert (tmp_path / "step-of-mine").is_dir()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    mine = RunFolder.create(small_config(tmp_path))
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder.open(mine.path)
    mine.unlock()
    mine.unlock()
    theirs = RunFolder.open(mine.path)
    theirs.lock()
    assert theirs.config() == small_config(tmp_path)
    theirs.unlock()


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    folders = [RunFolder.create(small_config(tmp_path)) for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        folder.unlock()


def test_a_folder_without_history_can_be_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(small_config(tmp_path))
    assert not folder.has_history
    folder.remove_if_unused()
    assert not folder.path.exists()
    folder.unlock()


def test_a_ledger_that_was_being_made_is_no_history(tmp_path: Path) -> None:
    folder = RunFolder.create(small_config(tmp_path))
    (folder.ledger / "ledger.new").write_bytes(b"")
    assert not folder.has_history
    folder.unlock()
