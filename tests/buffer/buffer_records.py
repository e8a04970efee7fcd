"""Small records for the buffer's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fathom.core.ids import EngineId, Occurrence, PolicyVersion, TaskId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.step import MaskReason, RowOutcome, StepMetrics, StepOutcome
from fathom.core.records.trajectory import (
    Graded,
    Reward,
    TokenBranch,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Turn,
    Ungraded,
)
from fathom.ledger.events import GroupStarted

Token = tuple[int, int, bool]
"""(policy version, KV version, has loss) of one sampled token."""

METRICS = StepMetrics(
    loss=0.0,
    grad_norm=0.0,
    lr=0.0,
    clip_fraction=0.0,
    entropy=0.0,
    kl=None,
    log_ratios_clamped=0,
    non_finite_tokens=0,
    tokens=0,
    rows=0,
    forward_tokens=0,
    step_s=0.0,
)


def branch(tokens: Sequence[Token], *, parent: int | None = None) -> TokenBranch:
    """One prompt token, then the sampled ones. A child shares the prompt token only."""
    n = len(tokens)
    turn = Turn(
        start=1,
        end=1 + n,
        engine=EngineId("scripted"),
        dtype="float32",
        kernels="sdpa",
        sampling=SamplingParams(),
        finish_reason=FinishReason.STOP,
        prompt_hash="",
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.0,
        generate_s=0.0,
    )
    return TokenBranch(
        parent=parent,
        shared_prefix=0 if parent is None else 1,
        token_ids=np.arange(1 + n, dtype=np.int32),
        sampled=np.array([False] + [True] * n),
        loss_mask=np.array([False] + [loss for _, _, loss in tokens]),
        logprobs=np.full(n, -0.5, np.float32),
        policy_version=np.array([version for version, _, _ in tokens], np.int32),
        kv_version=np.array([kv for _, kv, _ in tokens], np.int32),
        turns=(turn,),
    )


def trajectory(
    started: GroupStarted,
    member: int,
    branches: Sequence[Sequence[Token]],
    *,
    reward: float | None = 0.0,
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
    cause: str = "engine_error",
) -> Trajectory:
    """The `member`-th trajectory of a started group. `reward` None: ungraded for `cause`."""
    judged: Reward = Ungraded(cause=cause, detail="") if reward is None else graded(reward)
    numbers = sorted({n for tokens in branches for version, kv, _ in tokens for n in (version, kv)})
    header = TrajectoryHeader(
        id=started.members[member],
        group=started.group,
        member=member,
        occurrence=started.occurrence,
        attempt=started.attempt,
        task=started.task,
        status=status,
        cause="" if status is TrajectoryStatus.COMPLETED else "because",
        reward=judged,
        tokenizer=TokenizerIdentity(tokenizer="", template=""),
        adapter=None,
        started_s=0.0,
        ended_s=0.0,
    )
    payload = TokenPayload(
        versions=tuple(PolicyVersion(incarnation=1, number=n, digest=str(n)) for n in numbers),
        branches=tuple(branch(tokens, parent=0 if index else None) for index, tokens in enumerate(branches)),
    )
    return Trajectory(header=header, payload=payload)


def graded(reward: float) -> Graded:
    return Graded(components={"right": reward}, grader="test", answer_found=True)


def started_group(members: int = 2, *, version: int = 0) -> GroupStarted:
    return GroupStarted(
        group="g",
        occurrence=Occurrence(epoch=0, index=0),
        attempt=0,
        task=TaskId("t"),
        members=tuple(TrajectoryId(f"g/m{m}") for m in range(members)),
        version=version,
    )


def outcome(number: int, rows: Iterable[Row], *, stepped: bool = True, code: int = -1) -> StepOutcome:
    """A step in which every token of `rows` got the same mask code."""
    return outcome_of(number, [(row, np.full(len(row.positions), code, np.int8)) for row in rows], stepped=stepped)


def outcome_of(number: int, rows: Sequence[tuple[Row, np.ndarray]], *, stepped: bool) -> StepOutcome:
    return StepOutcome(
        number=number,
        stepped=stepped,
        why_not="" if stepped else "no usable token",
        metrics=METRICS,
        mismatch=None,
        slices=(),
        routes=None,
        rows=tuple(
            RowOutcome(
                trajectory=row.trajectory,
                branch=row.branch,
                positions=row.positions,
                trainer_logprobs=row.logprobs,
                weights=np.ones_like(row.logprobs),
                mask_codes=codes,
                advantage=0.0,
            )
            for row, codes in rows
        ),
    )


def code_of(reason: MaskReason) -> int:
    return list(MaskReason).index(reason)
