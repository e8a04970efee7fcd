"""How fast the ledger takes in history: trajectories of several lengths."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fathom.bench.options import LedgerOptions
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median
from fathom.core.ids import EngineId, Occurrence, PolicyVersion, TaskId, group_id, trajectory_id
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.trajectory import (
    Graded,
    TokenBranch,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Turn,
)
from fathom.ledger.events import IncarnationOpened, TrajectoryEnded
from fathom.ledger.writer import LedgerWriter

_VOCABULARY = 49_152
_HASH = "0" * 64
_VERSION = PolicyVersion(incarnation=1, number=0, digest=_HASH)


def ledger(options: LedgerOptions, say: Say) -> Measured:
    """Write ledgers of synthetic trajectories. Records are made before the clock starts."""
    samples: list[Sample] = []
    records = {f"{length} tokens": list(_records(length, options.tokens)) for length in options.lengths}
    for repeat, variant in alternating(list(records), options.repeats):
        with tempfile.TemporaryDirectory(prefix=".fathom-ledger-", dir=options.folder or ".") as scratch:
            seconds = _ingest(Path(scratch), records[variant], options)
        tokens = sum(len(record.payload.branches[0].token_ids) for record in records[variant])
        for measure, unit, value in (
            ("ingest", "tokens/s", tokens / seconds),
            ("per trajectory", "us", seconds / len(records[variant]) * 1e6),
        ):
            samples.append(Sample(variant=variant, measure=measure, unit=unit, repeat=repeat, value=value))
        say(f"{variant}: {tokens / seconds / 1e6:.2f} M tokens/s")
    return Measured(samples=samples, targets=[_target(samples, f"{length} tokens") for length in options.lengths])


def _ingest(folder: Path, records: Sequence[Trajectory], options: LedgerOptions) -> float:
    """Seconds to append and commit all of them."""
    writer = LedgerWriter.create(folder / "ledger", fsync=options.fsync)
    try:
        writer.append(IncarnationOpened(incarnation=1, parent_seq=None, start_step=0, config="{}", machine="{}"))
        writer.commit()
        began = time.perf_counter()
        for start in range(0, len(records), options.rows_per_commit):
            for record in records[start : start + options.rows_per_commit]:
                writer.append_trajectory(record, _ended(record))
            writer.commit()
        return time.perf_counter() - began
    finally:
        writer.close()


def _target(samples: Sequence[Sample], variant: str) -> Target:
    return Target(
        claim=f"ingest of trajectories of {variant}, tokens/s",
        measured=median(samples, variant, "ingest"),
        limit=1e6,
        at_most=False,
        required=False,
    )


def _records(length: int, tokens: int) -> Iterator[Trajectory]:
    """Trajectories of `length` tokens, `tokens` in all."""
    random = np.random.default_rng(length)
    for place in range(max(1, tokens // length)):
        yield _record(place, length, random)


def _record(place: int, length: int, random: np.random.Generator) -> Trajectory:
    occurrence = Occurrence(epoch=0, index=place)
    group = group_id(occurrence, 0, 1)
    return Trajectory(
        header=TrajectoryHeader(
            id=trajectory_id(group, 0),
            group=group,
            member=0,
            occurrence=occurrence,
            attempt=0,
            task=TaskId(f"bench/{place}"),
            status=TrajectoryStatus.COMPLETED,
            cause="",
            reward=Graded(components={"correct": 1.0}, grader="bench/1", answer_found=True),
            tokenizer=TokenizerIdentity(tokenizer=_HASH, template=_HASH),
            adapter=None,
            started_s=time.time(),
            ended_s=time.time(),
        ),
        payload=TokenPayload(versions=(_VERSION,), branches=(_branch(length, random),)),
    )


def _branch(length: int, random: np.random.Generator) -> TokenBranch:
    """Prompt and answer, each one half."""
    prompt = (length + 1) // 2
    sampled = np.arange(length) >= prompt
    turn = Turn(
        start=prompt,
        end=length,
        engine=EngineId("engine-0"),
        dtype="float32",
        kernels="sdpa",
        sampling=SamplingParams(),
        finish_reason=FinishReason.STOP,
        prompt_hash=_HASH,
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.0,
        generate_s=0.0,
    )
    return TokenBranch(
        parent=None,
        shared_prefix=0,
        token_ids=random.integers(0, _VOCABULARY, length).astype(np.int32),
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=-random.random(length - prompt, dtype=np.float32),
        policy_version=np.zeros(length - prompt, np.int32),
        kv_version=np.zeros(length - prompt, np.int32),
        turns=(turn,),
    )


def _ended(record: Trajectory) -> TrajectoryEnded:
    sampled = record.payload.num_sampled
    prompt = len(record.payload.branches[0].token_ids) - sampled
    return TrajectoryEnded(
        trajectory=record.header.id,
        arrival_age=0,
        sampled_tokens=sampled,
        prompt_tokens=prompt,
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
    )
