"""Sums a run up from its ledger alone. All of it is about the surviving lineage."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fathom.core.records.step import MismatchSlice
from fathom.evidence.report.books_summary import fortunes, summarise_books
from fathom.evidence.report.engines import engine_lives
from fathom.evidence.report.paired import PairedDifference, paired_difference
from fathom.evidence.report.pooling import pool, pool_routes
from fathom.evidence.report.prefix_bound import known_at_best
from fathom.evidence.report.run_summary import (
    AgeCount,
    EvaluationPoint,
    FaultCount,
    GapPoint,
    PublicationSummary,
    RunSummary,
    StepPoint,
    Throughput,
)
from fathom.evidence.report.teaching import summarise_teaching
from fathom.evidence.report.turns import TurnsSummary, asks_often, summarise_turns
from fathom.evidence.run_state import state_of
from fathom.evidence.worst import judge_norms
from fathom.ledger.entries import Recorded
from fathom.ledger.events import (
    EngineJoined,
    Evaluated,
    FaultSeen,
    IncarnationOpened,
    LoopSampled,
    Published,
    StepTaken,
    TrajectoryEnded,
    WarmStartStepped,
)
from fathom.ledger.lineage import Lineage
from fathom.ledger.reader import LedgerReader
from fathom.ledger.replay import replay


def summarise(reader: LedgerReader) -> RunSummary:
    """Read a run's ledger, which may still be written."""
    openings = reader.events(IncarnationOpened, include_undone=True)
    steps = reader.events(StepTaken)
    evaluations = reader.events(Evaluated)
    publications = reader.events(Published)
    warm = reader.events(WarmStartStepped)
    ends = reader.events(TrajectoryEnded)
    books = replay(reader)
    started = openings[0].at_s if openings else 0.0
    slices = [part for step in steps for part in step.event.slices]
    overall = [step.event.mismatch for step in steps if step.event.mismatch is not None]
    return RunSummary(
        state=state_of(reader),
        incarnations=len(openings),
        started_s=started,
        warm_start=(warm[-1].event.step, warm[-1].event.loss) if warm else None,
        steps=tuple(_point(step, started) for step in steps),
        unusual=tuple(norm for norm in judge_norms([step.event for step in steps]) if norm.anomalous),
        evaluations=tuple(_evaluation(entry.event) for entry in evaluations),
        before_after=_before_after([entry.event for entry in evaluations]),
        lengths=_lengths([entry.event for entry in evaluations]),
        teaching=summarise_teaching(
            [step.event.distillation for step in steps], [entry.event for entry in reader.events(EngineJoined)]
        ),
        books=summarise_books(books),
        fortunes=fortunes(books, reader.trajectories()),
        ages=_ages(slices),
        mismatch=pool(overall),
        routes=pool_routes([step.event.routes for step in steps if step.event.routes is not None]),
        gaps=tuple(
            GapPoint(version=entry.event.version.number, mismatch=entry.event.gap)
            for entry in publications
            if entry.event.gap is not None and entry.event.gap.tokens
        ),
        publications=_publications([entry.event for entry in publications]),
        throughput=_throughput(
            steps,
            publications,
            reader.lineage(),
            sampled_tokens=books.sampled_tokens,
            write_s=reader.write_seconds(),
        ),
        drafted_tokens=sum(end.event.drafted_tokens for end in ends),
        accepted_tokens=sum(end.event.accepted_tokens for end in ends),
        in_flight=tuple(
            (entry.at_s - started, entry.event.in_flight_trajectories) for entry in reader.events(LoopSampled)
        ),
        turns=_turns(reader, ends, steps),
        ungraded=tuple(Counter(end.event.ungraded for end in ends if end.event.ungraded).most_common()),
        engines=engine_lives(reader),
        faults=_faults(reader),
    )


def _point(step: Recorded[StepTaken], started: float) -> StepPoint:
    event = step.event
    counts = [(part.age, part.kv_age, part.mismatch.tokens) for part in event.slices]
    total = sum(tokens for _, _, tokens in counts)
    return StepPoint(
        number=event.number,
        at_s=step.at_s - started,
        stepped=event.stepped,
        reward_mean=event.reward_mean,
        tokens=event.metrics.tokens,
        rows=event.metrics.rows,
        step_s=event.metrics.step_s,
        waited_s=event.waited_s,
        age_mean=sum(age * tokens for age, _, tokens in counts) / total if total else None,
        age_max=max((age for age, _, _ in counts), default=None),
        kv_age_max=max((kv_age for _, kv_age, _ in counts), default=None),
        mismatch=event.mismatch,
        explained_variance=event.metrics.explained_variance,
    )


def _turns(
    reader: LedgerReader, ends: list[Recorded[TrajectoryEnded]], steps: list[Recorded[StepTaken]]
) -> TurnsSummary | None:
    if not asks_often(ends):
        return None  # and the records of its trajectories need not be read
    return summarise_turns(
        ends, steps, known_at_best(reader.trajectory(end.event.trajectory).trajectory for end in ends)
    )


def _evaluation(event: Evaluated) -> EvaluationPoint:
    return EvaluationPoint(
        version=event.version.number,
        tasks=event.tasks,
        samples=event.samples,
        pass_at=event.pass_at,
        pass_rate=event.pass_rate,
        low=event.low,
        high=event.high,
        reward_mean=event.reward_mean,
        ungraded=event.ungraded,
        tokens_mean=float(np.nanmean(event.tokens_per_task)) if np.isfinite(event.tokens_per_task).any() else None,
    )


def _before_after(evaluations: list[Evaluated]) -> PairedDifference | None:
    if len(evaluations) < 2 or evaluations[0].tasks != evaluations[-1].tasks:
        return None
    return paired_difference(evaluations[0].per_task, evaluations[-1].per_task)


def _lengths(evaluations: list[Evaluated]) -> PairedDifference | None:
    recorded = [event for event in evaluations if event.tokens_per_task]
    if len(recorded) < 2 or recorded[0].tasks != recorded[-1].tasks:
        return None
    return paired_difference(recorded[0].tokens_per_task, recorded[-1].tokens_per_task)


def _ages(slices: list[MismatchSlice]) -> tuple[AgeCount, ...]:
    found: list[AgeCount] = []
    for age, kv_age in sorted({(part.age, part.kv_age) for part in slices}):
        pooled = pool([part.mismatch for part in slices if (part.age, part.kv_age) == (age, kv_age)])
        if pooled is not None:
            found.append(AgeCount(age=age, kv_age=kv_age, mismatch=pooled))
    return tuple(found)


def _publications(events: list[Published]) -> PublicationSummary | None:
    if not events:
        return None
    deliveries = [event.stage_s + event.verify_s + event.commit_s for event in events]
    pauses = [event.pause_s for event in events]
    return PublicationSummary(
        count=len(events),
        size_bytes=events[-1].size_bytes,
        write_s=sum(event.write_s for event in events) / len(events),
        deliver_s=sum(deliveries) / len(events),
        deliver_max_s=max(deliveries),
        pause_s=sum(pauses) / len(events),
        pause_max_s=max(pauses),
        fenced=sum(len(event.fenced) for event in events),
    )


def _throughput(
    steps: list[Recorded[StepTaken]],
    published: list[Recorded[Published]],
    lineage: Lineage,
    *,
    sampled_tokens: int,
    write_s: float,
) -> Throughput | None:
    seconds = sum(_active_s(steps, published, first, last) for first, last in lineage.ranges)
    if not seconds:
        return None
    return Throughput(
        seconds=seconds,
        tokens_per_s=sum(step.event.metrics.tokens for step in steps) / seconds,
        sampled_tokens_per_s=sampled_tokens / seconds,
        trainer_busy=sum(step.event.metrics.step_s for step in steps) / seconds,
        trainer_waiting=sum(step.event.waited_s for step in steps) / seconds,
        ledger_share=write_s / seconds,
    )


def _active_s(steps: list[Recorded[StepTaken]], published: list[Recorded[Published]], first: int, last: int) -> float:
    """Seconds between the first publication and the last step of a stretch of the history."""
    begun = [entry.at_s for entry in published if first <= entry.seq <= last]
    taken = [entry.at_s for entry in steps if first <= entry.seq <= last]
    return max(taken[-1] - begun[0], 0.0) if begun and taken else 0.0


def _faults(reader: LedgerReader) -> tuple[FaultCount, ...]:
    found: dict[tuple[str, str], FaultCount] = {}
    for entry in reader.events(FaultSeen, include_undone=True):
        event = entry.event
        before = found.get((event.component, event.kind))
        found[event.component, event.kind] = FaultCount(
            component=event.component,
            kind=event.kind,
            count=1 + (before.count if before else 0),
            last_detail=event.detail,
        )
    return tuple(found.values())
