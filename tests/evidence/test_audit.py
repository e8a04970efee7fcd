"""The audit passes a right history and names what is wrong with a wrong one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fathom.core.errors import LedgerError
from fathom.core.records.step import MaskReason
from fathom.core.records.trajectory import Ungraded
from fathom.evidence.contracts.audit import AuditReport, audit
from fathom.ledger.reader import LedgerReader
from fathom.ledger.writer import LedgerWriter
from synthetic.history import History, config, write_run
from synthetic.records import outcome, policy, step


def report_of(ledger: Path) -> AuditReport:
    with LedgerReader(ledger) as reader:
        return audit(reader)


def failures(report: AuditReport) -> dict[str, str]:
    return {check.name: "\n".join(check.examples) for check in report.checks if not check.passed}


def test_a_right_history_passes_and_everything_was_looked_at(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path / "run") / "ledger")
    assert failures(report) == {}
    assert report.passed
    assert report.steps == 4
    assert all(check.examined > 0 for check in report.checks)


def begin(tmp_path: Path, **settings: int) -> History:
    history = History(tmp_path / "ledger")
    history.open(config(**settings))
    history.publish(0)
    return history


def over_age(history: History) -> None:
    old = history.group(0)
    for number in (1, 2):
        history.train(number, history.group(number - 1))
        history.publish(number)
    history.train(3, old)


def over_kv_age(history: History) -> None:
    for number in (1, 2):
        history.train(number, history.group(number - 1))
        history.publish(number)
    history.train(3, history.group(2, versions=(2, 2, 2), kv_versions=(0, 0, 0)))


def token_from_the_future(history: History) -> None:
    history.train(1, history.group(0))
    history.publish(1)
    history.train(2, history.group(1))
    history.publish(2)
    history.writer.commit()
    late = history.group(2)
    rows = tuple(outcome(record) for record in late)
    history.writer.append_step(step(2, rows), rows)


def unpublished_version(history: History) -> None:
    history.train(1, history.group(0))
    history.train(2, history.group(1))


def another_engines_version(history: History) -> None:
    history.train(1, history.group(0))
    history.publish(1, engine="engine-1")
    history.train(2, history.group(1))


def another_incarnations_version(history: History) -> None:
    history.train(1, history.group(0, made_by=7))


def trained_twice(history: History) -> None:
    records = history.group(0)
    history.train(1, records)
    history.publish(1)
    history.train(2, records, settle=False)


def one_position_twice(history: History) -> None:
    records = history.group(0)
    row = outcome(records[0])
    row = msgspec.structs.replace(row, positions=np.array([4, 4, *row.positions[2:]]))
    history.train(1, records, rows=(row, outcome(records[1])))


def occurrence_twice(history: History) -> None:
    history.train(1, history.group(0, place=3))
    history.train(2, history.group(0, place=3, attempt=1))


def wrong_count(history: History) -> None:
    records = history.group(0)
    rows = tuple(outcome(record) for record in records)
    history.writer.append_step(step(1, rows[:1]), rows)
    history.settle(records, 1)


def missing_trajectory(history: History) -> None:
    records = history.group(0)
    stranger = msgspec.structs.replace(outcome(records[0]), trajectory="1/e9.i9/a0/m0")
    history.train(1, records, rows=(stranger, outcome(records[1])))


def token_without_probability(history: History) -> None:
    records = history.group(0)
    row = outcome(records[0])
    row = msgspec.structs.replace(row, trainer_logprobs=np.full_like(row.trainer_logprobs, np.nan))
    history.train(1, records, rows=(row, outcome(records[1])))


def prompt_token_trained(history: History) -> None:
    records = history.group(0)
    row = outcome(records[0])
    row = msgspec.structs.replace(row, positions=row.positions - 1)
    history.train(1, records, rows=(row, outcome(records[1])))


def step_left_out(history: History) -> None:
    history.train(1, history.group(0))
    history.train(3, history.group(0))


def version_goes_back(history: History) -> None:
    history.train(1, history.group(0))
    history.publish(1)
    history.publish(0)


def published_something_else(history: History) -> None:
    history.train(1, history.group(0))
    history.publish(1, digest="f" * 64)


def coded_from_something_else(history: History) -> None:
    history.train(1, history.group(0))
    history.publish(1, digest="c" * 64, cast_digest="f" * 64)


def published_without_a_step(history: History) -> None:
    history.publish(5)


def books_out_of_balance(history: History) -> None:
    records = history.group(0)
    history.train(1, records)
    history.settle(records, 1)


def never_settled(history: History) -> None:
    history.train(1, history.group(0), settle=False)
    history.end(1)


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (over_age, "staleness", "step 3, 1/e0.i0/a0/m0 branch 0: age 2 to 2, allowed 0 to 1"),
        (over_kv_age, "staleness", "KV age 2 to 2, allowed 0 to 1"),
        (token_from_the_future, "staleness", "age -1 to -1"),
        (unpublished_version, "version", "never proven: v1@1"),
        (another_engines_version, "version", "never proven: v1@1 "),
        (another_incarnations_version, "version", "never proven: v0@7"),
        (trained_twice, "once", "4 tokens were trained before"),
        (one_position_twice, "once", "1 tokens were trained before"),
        (occurrence_twice, "once", "e0.i3 was trained by 2 groups"),
        (wrong_count, "counts", "reports 4 tokens in the gradient, its rows have 8"),
        (missing_trajectory, "record", "no trajectory '1/e9.i9/a0/m0'"),
        (token_without_probability, "probability", "4 tokens without"),
        (prompt_token_trained, "record", "was trained that has no loss in its record"),
        (step_left_out, "steps", "step 3 follows a history of 1 steps"),
        (version_goes_back, "versions", "v0@1 follows v1@1"),
        (published_something_else, "delivery", "v1@1 has digest ffffffffffff"),
        (coded_from_something_else, "delivery", "v1@1 has digest ffffffffffff"),
        (published_without_a_step, "delivery", "v5@1"),
        (books_out_of_balance, "books", "became trained after it was trained"),
        (never_settled, "books", "was used by a step and never settled"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_wrong_history_is_found(tmp_path: Path, spoil: Callable[[History], None], check: str, words: str) -> None:
    history = begin(tmp_path)
    spoil(history)
    history.writer.close() if spoil is not never_settled else None
    found = failures(report_of(tmp_path / "ledger"))
    assert words in found[check]


def test_a_coded_version_is_compared_by_the_cast_that_it_was_made_of(tmp_path: Path) -> None:
    history = begin(tmp_path)
    history.train(1, history.group(0))
    history.publish(1, digest="c" * 64, cast_digest=policy(1).digest)
    history.writer.close()
    assert "delivery" not in failures(report_of(tmp_path / "ledger"))


def test_ungraded_rows_may_not_train(tmp_path: Path) -> None:
    history = begin(tmp_path)
    records = history.group(0)
    ungraded = msgspec.structs.replace(
        records[0], header=msgspec.structs.replace(records[0].header, id="1/e0.i50/a0/m0", reward=Ungraded("x", "y"))
    )
    from synthetic.records import ended

    history.writer.append_trajectory(ungraded, ended(ungraded))
    history.train(1, [ungraded], settle=False)
    history.writer.close()
    assert "trained and ungraded" in failures(report_of(tmp_path / "ledger"))["record"]


def test_bounds_are_those_of_the_config(tmp_path: Path) -> None:
    history = begin(tmp_path, max_staleness=2, max_kv_staleness=2)
    over_age(history)
    history.writer.close()
    assert failures(report_of(tmp_path / "ledger")) == {}


def test_a_resumed_history_passes(tmp_path: Path) -> None:
    history = begin(tmp_path)
    buffered = history.group(0)
    history.train(1, history.group(0))
    seq = history.checkpoint(1)
    history.publish(1)
    history.train(2, buffered)
    history.publish(2)
    history.writer.close()
    resumed = History(tmp_path / "ledger", resumed=True)
    resumed.place = 10
    resumed.open(config(), incarnation=2, parent_seq=seq, step=1)
    resumed.publish(1)
    resumed.train(2, buffered)
    resumed.publish(2)
    resumed.train(3, resumed.group(2))
    resumed.writer.close()
    assert failures(report_of(tmp_path / "ledger")) == {}


def test_a_resumed_history_with_another_policy_fails(tmp_path: Path) -> None:
    history = begin(tmp_path)
    history.train(1, history.group(0))
    seq = history.checkpoint(1)
    history.writer.close()
    resumed = History(tmp_path / "ledger", resumed=True)
    resumed.open(config(), incarnation=2, parent_seq=seq, step=1)
    resumed.publish(1, digest="e" * 64)
    resumed.writer.close()
    assert "v1@2 has digest eeeeeeeeeeee" in failures(report_of(tmp_path / "ledger"))["delivery"]


def test_damage_is_a_failure_of_the_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    segment = folder / "ledger" / "arrays-00001.bin"
    whole = segment.read_bytes()
    segment.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "checksum differs" in failures(report_of(folder / "ledger"))["record"]


def test_an_empty_ledger_cannot_be_audited(tmp_path: Path) -> None:
    LedgerWriter.create(tmp_path).close()
    with pytest.raises(LedgerError, match="never started"):
        report_of(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM row_use WHERE place = 0",
        "UPDATE row_use SET in_gradient = in_gradient - 1 WHERE place = 1",
        "UPDATE row_use SET tokens = tokens + 1 WHERE place = 0",
        "UPDATE masked SET reason = 'veto'",
        "DELETE FROM masked",
    ],
)
def test_an_index_that_tells_other_tokens_than_the_rows_is_found(tmp_path: Path, change: str) -> None:
    history = begin(tmp_path)
    records = history.group(0)
    rows = [outcome(record) for record in records]
    codes = rows[0].mask_codes.copy()
    codes[0] = list(MaskReason).index(MaskReason.POPPED)
    rows[0] = msgspec.structs.replace(rows[0], mask_codes=codes)
    history.train(1, records, rows=tuple(rows))
    history.writer.close()
    assert "record" not in failures(report_of(tmp_path / "ledger"))
    database = sqlite3.connect(tmp_path / "ledger" / "ledger.sqlite")
    assert database.execute(change).rowcount > 0
    database.commit()
    database.close()
    assert "the index contradicts the rows" in failures(report_of(tmp_path / "ledger"))["record"]
