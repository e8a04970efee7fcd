"""A record that contradicts itself cannot be built; one that is built crosses a disk unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import RecordError
from fathom.core.ids import EngineId, Occurrence, PolicyVersion, TaskId, group_id, trajectory_id
from fathom.core.records.row import rows_of
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.trajectory import (
    Graded,
    KeptSets,
    TokenBranch,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Turn,
    Ungraded,
)
from fathom.core.wire import FrameReader, frame, pack, unpack


def turn(start: int, end: int, sampling: SamplingParams | None = None) -> Turn:
    return Turn(
        start=start,
        end=end,
        engine=EngineId("e0"),
        dtype="float32",
        kernels="sdpa",
        sampling=sampling or SamplingParams(),
        finish_reason=FinishReason.STOP,
        prompt_hash="00",
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.0,
        generate_s=0.1,
    )


def branch(**changes: Any) -> TokenBranch:
    sampled = np.array([False, False, True, True, False, True])
    fields: dict[str, Any] = dict(
        parent=None,
        shared_prefix=0,
        token_ids=np.arange(6, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        policy_version=np.array([1, 1, 2], np.int32),
        kv_version=np.array([1, 1, 1], np.int32),
        turns=(turn(2, 4), turn(5, 6)),
    )
    return TokenBranch(**{**fields, **changes})


VERSIONS = (PolicyVersion(1, 1, "aa"), PolicyVersion(1, 2, "bb"))


def trajectory(*branches: TokenBranch) -> Trajectory:
    group = group_id(Occurrence(0, 3), 0, 1)
    header = TrajectoryHeader(
        id=trajectory_id(group, 0),
        group=group,
        member=0,
        occurrence=Occurrence(0, 3),
        attempt=0,
        task=TaskId("t"),
        status=TrajectoryStatus.COMPLETED,
        cause="",
        reward=Graded(components={"score": 1.0}, grader="g/1", answer_found=True),
        tokenizer=TokenizerIdentity("aa", "bb"),
        adapter=None,
        started_s=1.0,
        ended_s=2.0,
    )
    return Trajectory(header, TokenPayload(versions=VERSIONS, branches=branches or (branch(),)))


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.array([-1.0, -2.0], np.float32)},
        {"logprobs": np.array([-1.0, -2.0, -3.0], np.float64)},
        {"logprobs": np.array([-1.0, np.nan, -3.0], np.float32)},
        {"logprobs": np.array([-1.0, 0.1, -3.0], np.float32)},
        {"logprobs": np.array([-1.0, -np.inf, -3.0], np.float32)},
        {"kv_version": np.array([2, 1, 1], np.int32)},
        {"policy_version": np.array([1, 1], np.int32)},
        {"loss_mask": np.ones(6, bool)},
        {"sampled": np.array([True, False, True, True, False, False])},
        {"turns": (turn(2, 4),)},
        {"turns": (turn(5, 6), turn(2, 4))},
        {"turns": (turn(2, 4), turn(5, 9))},
        {"turns": (turn(2, 4, SamplingParams(top_k=2)), turn(5, 6))},
        {"kept": KeptSets(np.array([0, 1, 1, 1], np.int64), np.array([5], np.int32))},
        {"kept": KeptSets(np.array([0, 2, 1, 1], np.int64), np.array([2], np.int32))},
        {"routes": np.zeros((4, 1, 2), np.uint8)},
        {"shared_prefix": 2},
        {"token_ids": np.empty(0, np.int32)},
        {"raw_logprobs": np.array([-1.0, np.nan, -3.0], np.float32)},
        {"raw_logprobs": np.array([-1.0, 0.5, -3.0], np.float32)},
    ],
    ids=range(20),
)
def test_a_contradiction_cannot_be_built(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        branch(**changes)


def test_unknown_versions_and_wrong_parents_are_refused() -> None:
    with pytest.raises(RecordError, match="unknown versions"):
        TokenPayload(versions=VERSIONS[:1], branches=(branch(),))
    with pytest.raises(RecordError, match="ordered"):
        TokenPayload(versions=VERSIONS[::-1], branches=(branch(),))
    with pytest.raises(RecordError, match="parent"):
        TokenPayload(versions=VERSIONS, branches=(branch(parent=0),))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([0, 1, 2, 9, 4, 5], np.int32)},
        {"shared_prefix": 6, "loss_mask": np.zeros(6, bool), "token_ids": np.array([0, 1, 2, 3, 4, 6], np.int32)},
        {"sampled": np.array([False, False, False, True, True, True]), "turns": (turn(3, 6),)},
    ],
)
def test_what_a_branch_shares_is_what_its_parent_has(changes: dict[str, Any]) -> None:
    fields = dict(parent=0, shared_prefix=4, loss_mask=np.array([False] * 5 + [True])) | changes
    with pytest.raises(RecordError, match="shares"):
        TokenPayload(versions=VERSIONS, branches=(branch(), branch(**fields)))


def test_a_branch_shares_no_more_than_its_parent_has() -> None:
    short = branch(
        token_ids=np.arange(4, dtype=np.int32),
        sampled=np.array([False, False, True, True]),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([-1.0, -2.0], np.float32),
        policy_version=np.array([1, 1], np.int32),
        kv_version=np.array([1, 1], np.int32),
        turns=(turn(2, 4),),
    )
    child = branch(parent=0, shared_prefix=5, loss_mask=np.array([False] * 5 + [True]))
    with pytest.raises(RecordError, match="shares"):
        TokenPayload(versions=VERSIONS, branches=(short, child))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_rewards_of_turns_are_finite(wrong: float) -> None:
    with pytest.raises(RecordError, match="finite"):
        Graded(components={"score": 1.0}, grader="g", answer_found=True, per_turn=(0.5, wrong))


def test_rewards_are_finite_or_named_as_missing() -> None:
    with pytest.raises(RecordError):
        Graded(components={"score": float("nan")}, grader="g", answer_found=True)
    with pytest.raises(RecordError):
        Graded(components={}, grader="g", answer_found=True)
    header = trajectory().header
    with pytest.raises(RecordError, match="cannot be graded"):
        msgspec.structs.replace(header, status=TrajectoryStatus.FAILED, cause="engine_error")
    failed = msgspec.structs.replace(
        header, status=TrajectoryStatus.FAILED, cause="x", reward=Ungraded("engine_error", "y")
    )
    assert failed.status is TrajectoryStatus.FAILED


def test_each_sampled_token_has_loss_in_exactly_one_row() -> None:
    child = branch(
        parent=0,
        shared_prefix=4,
        loss_mask=np.array([False, False, False, False, False, True]),
        token_ids=np.array([0, 1, 2, 3, 9, 8], np.int32),
    )
    silent = branch(parent=0, shared_prefix=4, loss_mask=np.zeros(6, bool))
    record = trajectory(branch(), child, silent)
    rows = rows_of(record)
    assert [(row.branch, row.positions.tolist()) for row in rows] == [(0, [2, 3, 5]), (1, [5])]
    assert rows[1].logprobs.tolist() == [-3.0]
    assert record.payload.num_sampled == 5
    assert record.payload.oldest_version == 1


def test_rows_keep_the_kept_sets_of_their_tokens() -> None:
    kept = KeptSets(np.array([0, 2, 2, 4], np.int64), np.array([2, 9, 5, 7], np.int32))
    [row] = rows_of(trajectory(branch(kept=kept, loss_mask=np.array([False, False, True, False, False, True]))))
    assert row.kept is not None
    assert [None if (ids := row.kept.of(i)) is None else ids.tolist() for i in range(2)] == [[2, 9], [5, 7]]


def same(left: Any, right: Any) -> bool:
    return pack(left) == pack(right)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_frames_survive_any_chunking(cuts: list[int]) -> None:
    record = trajectory()
    stream = frame(record) * 3
    reader, read, start = FrameReader(Trajectory), [], 0
    while start < len(stream):
        for cut in cuts:
            read += reader.feed(stream[start : start + cut])
            start += cut
    assert len(read) == 3
    assert all(same(record, got) for got in read)
    assert not reader.incomplete


def test_bytes_that_are_no_record_are_refused() -> None:
    skeleton, arrays = pack(trajectory())
    assert same(unpack(Trajectory, skeleton, arrays), trajectory())
    for broken in [(skeleton[:-3], arrays), (skeleton, b""), (b"", arrays), (skeleton, arrays[:-3])]:
        with pytest.raises(RecordError):
            unpack(Trajectory, *broken)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_greedy_and_empty_distributions_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
