"""Small records with believable contents, for tests that need a history and not a model."""

from __future__ import annotations

import msgspec
import numpy as np

from fathom.core.ids import EngineId, GroupId, Occurrence, PolicyVersion, TaskId, group_id, trajectory_id
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.step import MaskReason, Mismatch, MismatchSlice, RowOutcome, StepMetrics
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
)
from fathom.ledger.events import IncarnationOpened, StepTaken, TrajectoryEnded

TOKENIZER = TokenizerIdentity(tokenizer="a" * 64, template="b" * 64)


def policy(number: int, incarnation: int = 1) -> PolicyVersion:
    return PolicyVersion(incarnation=incarnation, number=number, digest=f"{number:064x}")


def opening(incarnation: int = 1, parent_seq: int | None = None, start_step: int = 0, config: str = "{}"):
    return IncarnationOpened(
        incarnation=incarnation, parent_seq=parent_seq, start_step=start_step, config=config, machine="{}"
    )


def branch(
    prompt: int,
    versions: np.ndarray,
    kv_versions: np.ndarray,
    rng: np.random.Generator,
    finish: FinishReason = FinishReason.STOP,
) -> TokenBranch:
    """`prompt` tokens of context, then one sampled token per entry of `versions`."""
    total = prompt + len(versions)
    sampled = np.arange(total) >= prompt
    turn = Turn(
        start=prompt,
        end=total,
        engine=EngineId("engine-0"),
        dtype="float32",
        kernels="sdpa",
        sampling=SamplingParams(),
        finish_reason=finish,
        prompt_hash="c" * 64,
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.01,
        generate_s=0.1,
    )
    return TokenBranch(
        parent=None,
        shared_prefix=0,
        token_ids=rng.integers(0, 60, total).astype(np.int32),
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=-rng.random(len(versions), dtype=np.float32),
        policy_version=versions.astype(np.int32),
        kv_version=kv_versions.astype(np.int32),
        turns=(turn,),
    )


def trajectory(
    *,
    place: int = 0,
    member: int = 0,
    epoch: int = 0,
    attempt: int = 0,
    incarnation: int = 1,
    prompt: int = 4,
    versions: tuple[int, ...] = (0, 0, 0),
    kv_versions: tuple[int, ...] | None = None,
    known: tuple[PolicyVersion, ...] | None = None,
    reward: float = 1.0,
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
    graded: Reward | None = None,
    started_s: float = 100.0,
    ended_s: float = 101.0,
    seed: int = 0,
) -> Trajectory:
    occurrence = Occurrence(epoch, place)
    group = group_id(occurrence, attempt, incarnation)
    behind = versions if kv_versions is None else kv_versions
    numbers = sorted({*versions, *behind})
    return Trajectory(
        header=TrajectoryHeader(
            id=trajectory_id(group, member),
            group=group,
            member=member,
            occurrence=occurrence,
            attempt=attempt,
            task=TaskId(f"task-{place}"),
            status=status,
            cause="" if status is TrajectoryStatus.COMPLETED else "length",
            reward=graded or Graded(components={"correct": reward}, grader="exact.1", answer_found=True),
            tokenizer=TOKENIZER,
            adapter=None,
            started_s=started_s,
            ended_s=ended_s,
        ),
        payload=TokenPayload(
            versions=known or tuple(policy(number) for number in numbers),
            branches=(branch(prompt, np.array(versions), np.array(behind), np.random.default_rng(seed)),),
        ),
    )


def routed(record: Trajectory) -> Trajectory:
    """The same with the routes of 3 layers, 2 experts per token."""
    branch = record.payload.branches[0]
    ids = np.random.default_rng(0).permuted(
        np.tile(np.arange(8, dtype=np.uint8), (len(branch.token_ids) - 1, 3, 1)), axis=2
    )
    with_routes = msgspec.structs.replace(branch, routes=np.ascontiguousarray(ids[..., :2]))
    payload = msgspec.structs.replace(record.payload, branches=(with_routes,))
    return msgspec.structs.replace(record, payload=payload)


def ended(record: Trajectory, arrival_age: int | None = 0, turns: int = 1) -> TrajectoryEnded:
    return TrajectoryEnded(
        trajectory=record.header.id,
        arrival_age=arrival_age,
        sampled_tokens=record.payload.num_sampled,
        prompt_tokens=4,
        cached_tokens=0,
        drafted_tokens=8,
        accepted_tokens=6,
        turns=turns,
    )


def outcome(record: Trajectory, gap: float = 0.01, masked: dict[int, MaskReason] | None = None) -> RowOutcome:
    """The row of a trajectory with one branch; `masked` says which of its tokens have no gradient."""
    first = record.payload.branches[0]
    positions = np.flatnonzero(first.loss_mask)
    codes = np.full(len(positions), -1, np.int8)
    for index, reason in (masked or {}).items():
        codes[index] = list(MaskReason).index(reason)
    return RowOutcome(
        trajectory=record.header.id,
        branch=0,
        positions=positions,
        trainer_logprobs=(first.logprobs - gap).astype(np.float32),
        weights=np.full(len(positions), np.exp(-gap), np.float32),
        mask_codes=codes,
        advantage=0.5,
    )


def mismatch(tokens: int, size: float = 0.01) -> Mismatch:
    return Mismatch(
        tokens=tokens,
        abs_log_ratio_mean=size,
        abs_log_ratio_max=2 * size,
        k1=size,
        k2=size * size / 2,
        k3=size * size / 2,
        ratio_mean=1 - size,
        ratio_p01=1 - 2 * size,
        ratio_p50=1 - size,
        ratio_p99=1.0,
        ratio_max=1.0,
        ess=0.99,
        clipped_share=0.0,
        popped_share=0.0,
    )


def step(
    number: int,
    rows: tuple[RowOutcome, ...],
    *,
    stepped: bool = True,
    ages: dict[tuple[int, int], int] | None = None,
    reward_mean: float | None = 0.5,
    digest: str | None = None,
) -> StepTaken:
    """`ages` counts tokens by (age, KV age)."""
    used = sum(int((row.mask_codes == -1).sum()) for row in rows)
    counts = {(0, 0): used} if ages is None else ages
    return StepTaken(
        number=number,
        stepped=stepped,
        why_not="" if stepped else "no usable token",
        metrics=StepMetrics(
            loss=0.1,
            grad_norm=1.0,
            lr=1e-3,
            clip_fraction=0.0,
            entropy=0.7,
            kl=None,
            log_ratios_clamped=0,
            non_finite_tokens=0,
            tokens=used,
            rows=len(rows),
            forward_tokens=4 * used,
            step_s=0.5,
        ),
        mismatch=mismatch(used) if used else None,
        slices=tuple(
            MismatchSlice(age=age, kv_age=kv_age, mismatch=mismatch(tokens, 0.01 * (1 + age)))
            for (age, kv_age), tokens in sorted(counts.items())
        ),
        reward_mean=reward_mean,
        weights_digest=policy(number).digest if digest is None else digest,
        waited_s=0.2,
    )


def group_of(record: Trajectory) -> GroupId:
    return record.header.group
