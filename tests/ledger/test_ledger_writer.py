"""What is committed is there, whole and in order, for any reader, while the writer goes on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fathom.core.errors import LedgerError
from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.step import MaskReason
from fathom.core.wire import pack
from fathom.ledger.events import (
    FaultSeen,
    GroupDequeued,
    IncarnationOpened,
    StepTaken,
    TrajectoryEnded,
    WarmStartStepped,
)
from fathom.ledger.reader import LedgerReader
from fathom.ledger.writer import LedgerWriter
from synthetic.records import ended, opening, outcome, step, trajectory


def warm(number: int) -> WarmStartStepped:
    return WarmStartStepped(step=number, loss=1.0 / number, tokens=10)


def test_a_reader_beside_the_writer_sees_commits_and_nothing_else(tmp_path: Path) -> None:
    with LedgerWriter.create(tmp_path) as writer, LedgerReader(tmp_path) as reader:
        assert writer.append(opening()) == 1
        assert writer.append(warm(1)) == 2
        assert reader.history() == []
        writer.commit()
        assert [entry.seq for entry in reader.history()] == [1, 2]
        writer.append(warm(2))
        writer.append(FaultSeen(component="engine-0", kind="timeout", detail="no answer in 5 s"))
        assert reader.last_seq == 2
        writer.commit()
        assert [entry.event for entry in reader.history(since=2)] == [
            warm(2),
            FaultSeen(component="engine-0", kind="timeout", detail="no answer in 5 s"),
        ]


def test_events_by_kind_range_and_latest(tmp_path: Path) -> None:
    times = iter(range(100, 200))
    with LedgerWriter.create(tmp_path, clock=lambda: float(next(times))) as writer:
        writer.append(opening())
        for number in range(1, 6):
            writer.append(warm(number))
            writer.append(GroupDequeued(group=GroupId("g"), age=number, waited_s=0.5))
    with LedgerReader(tmp_path) as reader:
        assert [entry.event.step for entry in reader.events(WarmStartStepped)] == [1, 2, 3, 4, 5]
        assert [entry.event.step for entry in reader.events(WarmStartStepped, since=2, until=6)] == [2, 3]
        assert [entry.seq for entry in reader.history((IncarnationOpened, GroupDequeued), limit=2)] == [1, 3]
        latest = reader.latest(WarmStartStepped)
        assert latest is not None
        assert (latest.seq, latest.at_s, latest.event.step) == (10, 109.0, 5)
        earlier = reader.latest(WarmStartStepped, until=9)
        assert earlier is not None
        assert earlier.event.step == 4
        assert reader.latest(FaultSeen) is None


def test_a_trajectory_comes_back_equal_with_its_content_hash(tmp_path: Path) -> None:
    record = trajectory(place=7, member=2, versions=(3, 3, 4), kv_versions=(3, 3, 3))
    with LedgerWriter.create(tmp_path) as writer, LedgerReader(tmp_path) as reader:
        writer.append(opening())
        writer.append_trajectory(record, ended(record, arrival_age=1))
        writer.commit()
        stored = reader.trajectory(record.header.id)
        assert pack(stored.trajectory) == pack(record)
        assert reader.trajectories() == [stored.entry]
        assert (stored.entry.occurrence.index, stored.entry.member, stored.entry.reward) == (7, 2, 1.0)
        assert reader.events(TrajectoryEnded)[0].event == ended(record, arrival_age=1)
        with pytest.raises(LedgerError, match="no trajectory 'nobody'"):
            reader.trajectory(TrajectoryId("nobody"))


def test_the_rows_of_a_step_say_where_they_came_from(tmp_path: Path) -> None:
    records = [trajectory(place=place, member=member) for place in (0, 1) for member in (0, 1)]
    masked = outcome(records[3], masked={0: MaskReason.POPPED, 2: MaskReason.VETO})
    rows = (*(outcome(record) for record in records[:3]), masked)
    with LedgerWriter.create(tmp_path) as writer, LedgerReader(tmp_path) as reader:
        writer.append(opening())
        for record in records:
            writer.append_trajectory(record, ended(record))
        seq = writer.append_step(step(1, rows), rows)
        writer.commit()
        uses = reader.rows_at(1)
        assert [use.trajectory for use in uses] == [record.header.id for record in records]
        assert [use.group for use in uses] == [record.header.group for record in records]
        assert [(use.seq, use.tokens, use.in_gradient) for use in uses] == [(seq, 3, 3)] * 3 + [(seq, 3, 1)]
        assert reader.rows_at(2) == []
        assert reader.rows_of(records[2].header.id) == [uses[2]]
        assert reader.masked_tokens() == [
            (seq, records[3].header.id, MaskReason.POPPED, 1),
            (seq, records[3].header.id, MaskReason.VETO, 1),
        ]
        np.testing.assert_array_equal(reader.outcomes(seq)[3].mask_codes, masked.mask_codes)
        assert reader.events(StepTaken)[0].event == step(1, rows)


def test_segments_roll_and_stay_readable(tmp_path: Path) -> None:
    records = [trajectory(place=place, seed=place) for place in range(10)]
    with LedgerWriter.create(tmp_path, segment_bytes=3000) as writer:
        writer.append(opening())
        for record in records:
            writer.append_trajectory(record, ended(record))
    assert len(list(tmp_path.glob("arrays-*.bin"))) > 2
    with LedgerReader(tmp_path) as reader:
        for record in records:
            assert pack(reader.trajectory(record.header.id).trajectory) == pack(record)


def test_reopening_goes_on_behind_the_last_event(tmp_path: Path) -> None:
    first, second = trajectory(place=0), trajectory(place=1, incarnation=2)
    with LedgerWriter.create(tmp_path, fsync=True) as writer:
        writer.append(opening())
        writer.append_trajectory(first, ended(first))
    with LedgerWriter.open(tmp_path, fsync=True) as writer:
        assert writer.last_seq == 2
        assert writer.append(opening(2, parent_seq=2)) == 3
        writer.append_trajectory(second, ended(second))
    with LedgerReader(tmp_path) as reader:
        assert [entry.id for entry in reader.trajectories()] == [first.header.id, second.header.id]
        assert pack(reader.trajectory(first.header.id).trajectory) == pack(first)
        assert reader.write_seconds() > 0


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    record = trajectory()
    with LedgerWriter.create(tmp_path) as writer:
        writer.append(opening())
        writer.append_trajectory(record, ended(record))
    segment = tmp_path / "arrays-00001.bin"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with LedgerReader(tmp_path) as reader, pytest.raises(LedgerError, match="checksum differs"):
        reader.trajectory(record.header.id)
    segment.write_bytes(whole[:-1])
    with LedgerReader(tmp_path) as reader, pytest.raises(LedgerError, match="was cut"):
        reader.trajectory(record.header.id)


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger in"):
        LedgerWriter.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with LedgerWriter.create(tmp_path) as writer:
        with pytest.raises(LedgerError, match="open an incarnation first"):
            writer.append(warm(1))
        with pytest.raises(LedgerError, match="incarnation 2 cannot be opened"):
            writer.append(opening(2))
        with pytest.raises(LedgerError, match="no event of this ledger"):
            writer.append(opening(1, parent_seq=9))
        writer.append(opening())
        with pytest.raises(LedgerError, match="incarnation 2 cannot be opened"):
            writer.append(opening(2))
        record = trajectory()
        with pytest.raises(LedgerError, match="use append_trajectory or append_step"):
            writer.append(ended(record))
        with pytest.raises(LedgerError, match="does not describe"):
            writer.append_trajectory(record, msgspec.structs.replace(ended(record), sampled_tokens=99))
        writer.append_trajectory(record, ended(record))
        writer.commit()
        with pytest.raises(LedgerError, match="already holds a ledger"):
            LedgerWriter.create(tmp_path)


OPEN = """
import sys
from pathlib import Path
from fathom.ledger.writer import LedgerWriter
LedgerWriter.open(Path(sys.argv[1]))
"""


def test_there_is_one_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
    with LedgerWriter.create(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "being written by another process" in done.stderr


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: b"", "empty or damaged; restore it"),
        (lambda content: content[:5000], "a damaged one is restored"),
        (
            lambda content: content[:60] + (7).to_bytes(4, "big") + content[64:],
            "use the version of Fathom that wrote it",
        ),
    ],
    ids=["empty", "cut", "another layout"],
)
def test_a_ledger_that_cannot_be_read_says_what_to_do(tmp_path: Path, damage, told: str) -> None:
    LedgerWriter.create(tmp_path).close()
    path = tmp_path / "ledger.sqlite"
    content = damage(path.read_bytes())
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=told), LedgerReader(tmp_path) as reader:
        reader.trajectories()


def test_a_commit_that_failed_can_be_made_again(tmp_path: Path) -> None:
    with LedgerWriter.create(tmp_path) as writer:
        writer.append(opening())
        writer.commit()
        writer.append(warm(1))
        other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        other.execute("CREATE TRIGGER full BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'no room'); END")
        with pytest.raises(LedgerError, match="no room"):
            writer.commit()
        other.execute("DROP TRIGGER full")
        other.close()
        writer.commit()
    with LedgerReader(tmp_path) as reader:
        assert [each.event for each in reader.events(WarmStartStepped)] == [warm(1)]


def test_a_record_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    first, second = trajectory(), trajectory(place=1)
    with LedgerWriter.create(tmp_path) as writer:
        writer.append(opening())
        for record in (first, second):
            writer.append_trajectory(record, ended(record))
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    place = database.execute("SELECT offset, skeleton_bytes, array_bytes, checksum FROM trajectory ORDER BY seq")
    database.execute(
        "UPDATE trajectory SET offset = ?, skeleton_bytes = ?, array_bytes = ?, checksum = ?", place.fetchone()
    )
    database.commit()
    database.close()
    with LedgerReader(tmp_path) as reader:
        reader.trajectory(first.header.id)
        with pytest.raises(LedgerError, match="holds the record of"):
            reader.trajectory(second.header.id)


@pytest.mark.parametrize("change", ["reward = 0", "sampled_tokens = 2", "status = 'truncated'", "place = 7"])
def test_an_index_that_contradicts_its_record_is_found(tmp_path: Path, change: str) -> None:
    record = trajectory()
    with LedgerWriter.create(tmp_path) as writer:
        writer.append(opening())
        writer.append_trajectory(record, ended(record))
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute(f"UPDATE trajectory SET {change}")
    database.commit()
    database.close()
    with LedgerReader(tmp_path) as reader, pytest.raises(LedgerError, match="index contradicts"):
        reader.trajectory(record.header.id)
