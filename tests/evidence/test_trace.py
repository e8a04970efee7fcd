"""A trace says of each token where it came from and what became of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fathom.core.errors import LedgerError
from fathom.core.ids import TrajectoryId
from fathom.core.records.states import Fate
from fathom.core.records.step import MaskReason
from fathom.evidence.trace import trace_step, trace_trajectory
from fathom.ledger.reader import LedgerReader
from synthetic.history import History, config
from synthetic.records import outcome


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    return history


def test_the_tokens_of_a_step(history: History, tmp_path: Path) -> None:
    history.train(1, history.group(0))
    history.publish(1)
    records = history.group(1, versions=(0, 1, 1), kv_versions=(0, 0, 0))
    rows = (outcome(records[0], gap=0.5, masked={1: MaskReason.POPPED}), outcome(records[1]))
    history.train(2, records, rows=rows)
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        traces = trace_step(reader)
        assert [trace.step for trace in traces] == [2, 2]
        assert trace_step(reader, 2, limit=1) == traces[:1]
        first = traces[0]
        branch = records[0].payload.branches[0]
        assert list(first.prompt_ids) == branch.token_ids[:4].tolist()
        assert [token.position for token in first.tokens] == [4, 5, 6]
        assert [token.version for token in first.tokens] == [0, 1, 1]
        assert [token.kv_version for token in first.tokens] == [0, 0, 0]
        assert [token.logprob for token in first.tokens] == branch.logprobs.tolist()
        assert [token.ratio for token in first.tokens] == pytest.approx([math.exp(-0.5)] * 3)
        assert [(token.in_gradient, token.reason) for token in first.tokens] == [
            (True, ""),
            (False, "popped"),
            (True, ""),
        ]
        assert [version.split()[0] for version in first.versions] == ["v0@1", "v1@1"]
        assert (first.reward, first.advantage, first.engine) == (0.0, 0.5, "engine-0 float32 sdpa")
        assert trace_trajectory(reader, records[0].header.id) == [first]
        with pytest.raises(LedgerError, match="there is no step 9; the run has steps 1 to 2"):
            trace_step(reader, 9)


def test_tokens_that_no_step_used_say_why(history: History, tmp_path: Path) -> None:
    dropped, used = history.group(0), history.group(0)
    history.drop(dropped, Fate.AGE)
    history.train(1, used, stepped=False, settle=False)
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        (trace,) = trace_trajectory(reader, dropped[0].header.id)
        assert (trace.step, trace.advantage) == (None, None)
        assert {(token.reason, token.ratio) for token in trace.tokens} == {("dropped: age", None)}
        assert {token.reason for token in trace_step(reader, 1)[0].tokens} == {"no step: no usable token"}
        with pytest.raises(LedgerError, match="no trajectory"):
            trace_trajectory(reader, TrajectoryId("nobody"))


def test_a_step_without_effect_is_shown_after_the_one_that_took_its_number(history: History, tmp_path: Path) -> None:
    refused, used = history.group(0), history.group(0)
    history.train(1, refused, stepped=False)
    history.train(1, used)
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        traces = trace_step(reader, 1)
        assert [trace.trajectory for trace in traces] == [record.header.id for record in (*used, *refused)]
        assert [{token.reason for token in trace.tokens} for trace in traces] == [{""}] * 2 + [
            {"no step: no usable token"}
        ] * 2
        assert trace_step(reader, limit=3) == traces[:3]


def test_undone_trajectories_can_be_traced(history: History, tmp_path: Path) -> None:
    seq = history.checkpoint(0)
    undone = history.group(0)
    history.train(1, undone)
    history.writer.close()
    resumed = History(tmp_path, resumed=True)
    resumed.open(config(), incarnation=2, parent_seq=seq)
    resumed.writer.close()
    with LedgerReader(tmp_path) as reader:
        (trace,) = trace_trajectory(reader, undone[0].header.id)
        assert {token.reason for token in trace.tokens} == {"undone by a resume"}
        with pytest.raises(LedgerError, match="no step has been taken yet"):
            trace_step(reader)
