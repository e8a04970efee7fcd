"""A run's history written by hand: right by default, and wrong exactly where a test asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fathom.config.load import parse_config
from fathom.config.run import RunConfig
from fathom.core.ids import Occurrence, group_id, trajectory_id
from fathom.core.records.sampling import FinishReason
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import RowOutcome
from fathom.core.records.trajectory import Trajectory, TrajectoryStatus
from fathom.ledger.events import (
    AttemptMoved,
    CheckpointSaved,
    EngineServes,
    Evaluated,
    FaultSeen,
    GroupDequeued,
    GroupStarted,
    LoopSampled,
    OccurrenceClosed,
    Published,
    RunEnded,
)
from fathom.ledger.writer import LedgerWriter
from synthetic.records import ended, mismatch, opening, outcome, policy, routed, step, trajectory

__all__ = ["FinishReason", "History", "config", "write_run"]


def config(max_staleness: int = 1, max_kv_staleness: int | None = None, steps: int = 4) -> RunConfig:
    tree = {
        "name": "synthetic",
        "model": {"tiny": "arithmetic"},
        "task": {"kind": "arithmetic"},
        "rollout": {"group_size": 2, "max_new_tokens": 8, "max_prompt_tokens": 8},
        "staleness": {"max_staleness": max_staleness},
        "trainer": {"steps": steps, "groups_per_step": 2},
    }
    if max_kv_staleness is not None:
        tree["staleness"]["max_kv_staleness"] = max_kv_staleness
    return parse_config(tree, "synthetic")


def _seconds(now: float) -> Iterator[float]:
    while True:
        yield now
        now += 0.05


class History:
    """Writes events in the order a run does."""

    def __init__(self, ledger: Path, *, resumed: bool = False, start_s: float = 1_700_000_000.0) -> None:
        seconds = _seconds(start_s)
        opener = LedgerWriter.open if resumed else LedgerWriter.create
        self.writer = opener(ledger, clock=lambda: next(seconds))
        self.incarnation = 1
        self.place = 0
        self.routed = False
        """Trajectories come with expert routes."""
        self.turns = 1
        """Calls that each trajectory is said to have made."""

    def open(self, settings: RunConfig, *, incarnation: int = 1, parent_seq: int | None = None, step: int = 0) -> int:
        self.incarnation = incarnation
        text = settings.model_dump_json()
        return self.writer.append(opening(incarnation, parent_seq, step, text))

    def publish(
        self, number: int, *, digest: str | None = None, cast_digest: str | None = None, engine: str = "engine-0"
    ) -> int:
        version = policy(number, self.incarnation)
        if digest is not None:
            version = type(version)(incarnation=self.incarnation, number=number, digest=digest)
        self.writer.append(EngineServes(engine=engine, version=version))
        return self.writer.append(
            Published(
                version=version,
                parent=None,
                transport="shared",
                size_bytes=4_000_000,
                moved_bytes=4_000_000,
                write_s=0.03,
                stage_s=0.02,
                verify_s=0.01,
                commit_s=0.005,
                pause_s=0.004,
                committed=(engine,),
                fenced=(),
                gap=mismatch(64, 1e-6),
                cast_digest=cast_digest,
            )
        )

    def group(
        self,
        version: int,
        *,
        place: int | None = None,
        attempt: int = 0,
        versions: tuple[int, ...] | None = None,
        kv_versions: tuple[int, ...] | None = None,
        made_by: int | None = None,
        status: TrajectoryStatus = TrajectoryStatus.COMPLETED,
        ended_s: float = 101.0,
    ) -> list[Trajectory]:
        """Start a group of two at the next occurrence, end and buffer it."""
        place = self._next_place() if place is None else place
        occurrence = Occurrence(0, place)
        group = group_id(occurrence, attempt, self.incarnation)
        members = tuple(trajectory_id(group, member) for member in range(2))
        self.writer.append(
            GroupStarted(
                group=group,
                occurrence=occurrence,
                attempt=attempt,
                task=f"task-{place}",  # pyright: ignore
                members=members,
                version=version,
            )
        )
        numbers = versions or (version,) * (4 + place % 3)
        behind = kv_versions or (min(numbers),) * len(numbers)
        known = tuple(policy(n, made_by or self.incarnation) for n in sorted({*numbers, *behind}))
        records = [
            trajectory(
                place=place,
                member=member,
                attempt=attempt,
                incarnation=self.incarnation,
                versions=numbers,
                kv_versions=behind,
                known=known,
                reward=float(member),
                status=status,
                ended_s=ended_s,
                seed=10 * place + member,
            )
            for member in range(2)
        ]
        if self.routed:
            records = [routed(record) for record in records]
        for record in records:
            self.writer.append_trajectory(record, ended(record, turns=self.turns))
            self.move(record, AttemptState.BUFFERED)
        return records

    def move(self, record: Trajectory, state: AttemptState, fate: Fate | None = None, at_step: int = 0) -> None:
        self.writer.append(
            AttemptMoved(trajectory=record.header.id, state=state, fate=fate, detail="", at_step=at_step)
        )

    def train(
        self,
        number: int,
        records: list[Trajectory],
        *,
        rows: tuple[RowOutcome, ...] | None = None,
        stepped: bool = True,
        digest: str | None = None,
        settle: bool = True,
    ) -> int:
        """Dequeue, step, settle."""
        for record in records[::2]:
            self.writer.append(GroupDequeued(group=record.header.group, age=0, waited_s=0.1))
        rows = tuple(outcome(record) for record in records) if rows is None else rows
        ages: dict[tuple[int, int], int] = {}
        for record in records:
            branch = record.payload.branches[0]
            for version, behind in zip(branch.policy_version, branch.kv_version, strict=True):
                key = (number - 1 - int(version), number - 1 - int(behind))
                ages[key] = ages.get(key, 0) + 1
        reward = 0.2 + 0.1 * number
        taken = step(number, rows, stepped=stepped, ages=ages, reward_mean=reward, digest=digest)
        seq = self.writer.append_step(taken, rows)
        if settle:
            self.settle(records, number)
        self.writer.commit()
        return seq

    def settle(self, records: list[Trajectory], number: int) -> None:
        for record in records:
            self.move(record, AttemptState.TRAINED, at_step=number)
        for record in records[::2]:
            self.close_occurrence(record, trained=True)

    def close_occurrence(self, record: Trajectory, *, trained: bool, fate: Fate | None = None) -> None:
        self.writer.append(
            OccurrenceClosed(occurrence=record.header.occurrence, group=record.header.group, trained=trained, fate=fate)
        )

    def evaluate(self, number: int, rewards: list[float]) -> None:
        graded = [reward for reward in rewards if not math.isnan(reward)]
        self.writer.append(
            Evaluated(
                version=policy(number, self.incarnation),
                tasks=len(rewards),
                samples=1,
                pass_at=1,
                pass_rate=sum(graded) / len(graded),
                low=0.1,
                high=0.9,
                reward_mean=sum(graded) / len(graded),
                ungraded=len(rewards) - len(graded),
                per_task=tuple(rewards),
                seconds=1.5,
            )
        )

    def checkpoint(self, number: int) -> int:
        return self.writer.append(CheckpointSaved(step=number, path=f"checkpoints/step-{number}", seconds=0.1))

    def loop(self) -> None:
        self.writer.append(
            LoopSampled(
                in_flight_trajectories=4,
                in_flight_groups=2,
                buffered_groups=1,
                oldest_version=0,
                trainer_waits_for="a batch",
                source_waits_for="",
            )
        )

    def drop(self, records: list[Trajectory], fate: Fate) -> None:
        for record in records:
            self.move(record, AttemptState.DROPPED, fate)
        self.close_occurrence(records[0], trained=False, fate=fate)

    def fault(self) -> None:
        self.writer.append(FaultSeen(component="engine-0", kind="timeout", detail="no answer within 5 s"))

    def end(self, number: int, reason: str = "steps") -> None:
        self.writer.append(RunEnded(reason=reason, step=number))
        self.writer.close()

    def _next_place(self) -> int:
        self.place += 1
        return self.place - 1


def write_run(folder: Path, *, steps: int = 4, finished: bool = True) -> Path:
    """A whole run: ages 0 and 1, one group dropped for age, evaluations before and after, one fault."""
    folder.mkdir(parents=True)
    settings = config(steps=steps)
    (folder / "config.json").write_text(settings.model_dump_json(exclude_unset=True))
    history = History(folder / "ledger")
    history.open(settings)
    history.publish(0)
    history.evaluate(0, [0.0, 0.0, 1.0, 0.0, math.nan])
    for number in range(1, steps + 1):
        fresh = history.group(number - 1)
        older = history.group(max(0, number - 2), ended_s=103.0)
        history.loop()
        history.train(number, [*fresh, *older])
        history.publish(number)
    history.drop(history.group(0, ended_s=120.0), Fate.AGE)
    history.fault()
    history.evaluate(steps, [1.0, 0.0, 1.0, 1.0, 1.0])
    history.checkpoint(steps)
    if finished:
        history.end(steps)
    else:
        history.writer.close()
    return folder
