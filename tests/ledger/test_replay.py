"""The books folded from a history balance, and say what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.core.records.states import AttemptState, Fate, OccurrenceState
from fathom.core.records.step import MaskReason
from fathom.ledger.reader import LedgerReader
from fathom.ledger.replay import Books, replay
from synthetic.history import History, config, write_run
from synthetic.records import outcome


def books_of(folder: Path) -> Books:
    with LedgerReader(folder) as reader:
        return replay(reader)


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    return history


def test_a_whole_run_balances(tmp_path: Path) -> None:
    books = books_of(write_run(tmp_path / "run") / "ledger")
    assert books.faults == []
    assert books.occurrence_counts == {OccurrenceState.TRAINED: 8, OccurrenceState.GIVEN_UP: 1}
    assert books.attempt_counts == {(AttemptState.TRAINED, None): 16, (AttemptState.DROPPED, Fate.AGE): 2}
    assert books.sampled_tokens == books.tokens_in_gradient + books.tokens_masked.total()
    assert books.tokens_masked == {MaskReason.AGE: 2 * 6}
    assert books.tokens_waiting == 0


def test_tokens_are_told_apart_by_reason(history: History, tmp_path: Path) -> None:
    records = history.group(0)
    rows = (outcome(records[0]), outcome(records[1], masked={0: MaskReason.POPPED, 1: MaskReason.VETO}))
    history.train(1, records, rows=rows)
    waiting = history.group(0)
    history.writer.close()
    books = books_of(tmp_path)
    assert books.faults == []
    assert books.tokens_masked == {MaskReason.POPPED: 1, MaskReason.VETO: 1}
    assert books.tokens_waiting == sum(record.payload.num_sampled for record in waiting)
    assert books.sampled_tokens == books.tokens_in_gradient + books.tokens_masked.total() + books.tokens_waiting


def test_a_trained_trajectory_without_loss_somewhere_is_no_loss(history: History, tmp_path: Path) -> None:
    records = history.group(0)
    history.train(1, records, rows=(outcome(records[0]),))
    history.writer.close()
    assert books_of(tmp_path).tokens_masked == {MaskReason.NO_LOSS: records[1].payload.num_sampled}


def test_a_step_without_effect_trains_nothing(history: History, tmp_path: Path) -> None:
    records = history.group(0)
    history.train(1, records, stepped=False, settle=False)
    for record in records:
        history.move(record, AttemptState.DROPPED, Fate.NO_STEP)
    history.writer.close()
    books = books_of(tmp_path)
    assert books.faults == []
    assert books.tokens_in_gradient == 0
    assert books.tokens_masked == {MaskReason.NOT_TRAINED: books.sampled_tokens}


def test_a_resume_gives_back_what_it_undid(history: History, tmp_path: Path) -> None:
    records = history.group(0)
    seq = history.checkpoint(0)
    history.train(1, records)
    history.writer.close()
    resumed = History(tmp_path, resumed=True)
    resumed.open(config(), incarnation=2, parent_seq=seq)
    resumed.publish(0)
    resumed.train(1, records)
    resumed.writer.close()
    with LedgerReader(tmp_path) as reader:
        at_checkpoint, now = replay(reader, until=seq), replay(reader)
    assert at_checkpoint.attempt_counts == {(AttemptState.BUFFERED, None): 2}
    assert now.attempt_counts == {(AttemptState.TRAINED, None): 2}
    assert at_checkpoint.faults == now.faults == []
    assert now.tokens_in_gradient == now.sampled_tokens


def test_contradictions_are_named(history: History, tmp_path: Path) -> None:
    first = history.group(0, place=0)
    history.train(1, first)
    history.move(first[0], AttemptState.DROPPED, Fate.AGE)
    again = history.group(0, place=0, attempt=1)
    history.train(2, again)
    history.drop(history.group(0, place=1), Fate.AGE)
    lost = history.group(0, place=2)
    history.close_occurrence(lost[0], trained=True)
    history.writer.close()
    text = "\n".join(books_of(tmp_path).faults)
    assert "became dropped after it was trained" in text
    assert "starts at e0.i0, which is trained" in text
    assert "e0.i0 was closed twice" in text
    assert "e0.i0 was trained by 2 groups" in text
    assert "e0.i2 was closed while members of 1/e0.i2/a0 were unfinished" in text
    assert "e0.i1" not in text
