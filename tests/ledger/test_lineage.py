"""Resuming chooses a prefix; what came after it is undone but stays readable."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fathom.ledger.events import StepTaken
from fathom.ledger.lineage import Lineage, Opening
from fathom.ledger.reader import LedgerReader
from fathom.ledger.writer import LedgerWriter
from synthetic.records import ended, opening, outcome, step, trajectory


@st.composite
def openings(draw: st.DrawFn) -> tuple[list[Opening], int]:
    """Incarnations of random lengths, each going on from any earlier event or from nothing."""
    found: list[Opening] = []
    last = 0
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.one_of(st.none(), st.integers(1, last))) if last else None
        found.append(Opening(seq=last + 1, parent_seq=parent))
        last += draw(st.integers(1, 5))
    return found, last


@given(openings())
def test_a_lineage_is_the_chain_of_parents(history: tuple[list[Opening], int]) -> None:
    found, last = history
    parents = {opening.seq: opening.parent_seq for opening in found}
    chain: list[int] = []
    seq: int | None = last
    while seq is not None and seq > 0:
        chain.append(seq)
        seq = parents[seq] if seq in parents else seq - 1
    lineage = Lineage.ending_at(found, last)
    assert [seq for seq in range(1, last + 1) if seq in lineage] == chain[::-1]
    assert list(lineage.ranges) == sorted(lineage.ranges)


def test_queries_follow_the_surviving_lineage(tmp_path: Path) -> None:
    records = [trajectory(place=0), trajectory(place=1), trajectory(place=1, incarnation=2)]
    rows = [(outcome(record),) for record in records]
    with LedgerWriter.create(tmp_path) as writer:
        writer.append(opening())
        for number in (1, 2):
            writer.append_trajectory(records[number - 1], ended(records[number - 1]))
            writer.append_step(step(number, rows[number - 1]), rows[number - 1])
    with LedgerWriter.open(tmp_path) as writer:
        writer.append(opening(2, parent_seq=3, start_step=1))
        writer.append_trajectory(records[2], ended(records[2]))
        writer.append_step(step(2, rows[2]), rows[2])
    with LedgerReader(tmp_path) as reader:
        assert reader.lineage().ranges == ((1, 3), (6, 8))
        assert reader.lineage(until=5).ranges == ((1, 5),)
        assert [entry.seq for entry in reader.history()] == [1, 2, 3, 6, 7, 8]
        assert [entry.seq for entry in reader.history(include_undone=True)] == list(range(1, 9))
        assert [entry.seq for entry in reader.events(StepTaken, until=5)] == [3, 5]
        assert [use.trajectory for use in reader.rows_at(2)] == [records[2].header.id]
        assert [use.trajectory for use in reader.rows_at(2, include_undone=True)] == [r.header.id for r in records[1:]]
        assert [entry.id for entry in reader.trajectories()] == [records[0].header.id, records[2].header.id]
        assert reader.trajectory(records[1].header.id).entry.seq not in reader.lineage()
        assert reader.rows_of(records[1].header.id) == []
