"""Checks that look at every token of every step."""

from __future__ import annotations

from collections import defaultdict
from typing import final

import numpy as np

from fathom.config.trainer import StalenessConfig
from fathom.core.ids import Occurrence, PolicyVersion, TrajectoryId
from fathom.core.records.trajectory import Graded, TokenizerIdentity
from fathom.evidence.contracts.check import Check, Examiner
from fathom.evidence.contracts.trained_rows import TrainedRow
from fathom.ledger.entries import Recorded
from fathom.ledger.events import StepTaken
from fathom.ledger.lineage import Lineage


@final
class TokenChecks:
    """Fed with publications and rows in the order of the history."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._served: set[tuple[str, PolicyVersion]] = set()
        self._trained: dict[tuple[TrajectoryId, int], np.ndarray] = {}
        self._groups: dict[Occurrence, set[str]] = defaultdict(set)
        self._tokenizers: set[TokenizerIdentity] = set()
        self._record = Examiner(
            "record", "each row's trajectory survives, is intact, is graded, and all share one tokenizer and template"
        )
        self._version = Examiner(
            "version",
            "each trained token and the oldest KV behind it are of versions that its engine had proven by then",
        )
        self._probability = Examiner("probability", "each trained token has the behaviour's and trainer's probability")
        self._staleness = Examiner("staleness", "no trained token is over the bound on age or KV age at its step")
        self._once = Examiner("once", "each token, and each occurrence, is trained at most once")
        self._routing = Examiner("routing", "each trained token is in a row with complete expert routes")
        self._records_routes: bool | None = None
        self._counts = Examiner("counts", "the token counts that steps report are those of their rows")

    def serve(self, engine: str, version: PolicyVersion) -> None:
        """An engine was proven to hold a version. Tokens of it may have been recorded a moment earlier."""
        self._served.add((engine, version))

    def open(self, *, records_routes: bool) -> None:
        """An incarnation begins, with or without expert routes."""
        self._records_routes = records_routes

    def step(self, step: Recorded[StepTaken], rows: list[TrainedRow], bounds: StalenessConfig) -> None:
        """Examine a step."""
        for row in rows:
            self._examine(row, bounds)
        event = step.event
        if not event.stepped:
            return
        used = sum(int((row.outcome.mask_codes == -1).sum()) for row in rows)
        self._counts.expect(
            event.metrics.tokens == used,
            f"step {event.number} reports {event.metrics.tokens} tokens in the gradient, its rows have {used}",
        )
        if event.mismatch is not None:
            sliced = sum(part.mismatch.tokens for part in event.slices)
            self._counts.expect(
                sliced == event.mismatch.tokens,
                f"step {event.number}: slices by age have {sliced} of {event.mismatch.tokens} tokens",
            )

    def unreadable(self, step: Recorded[StepTaken], error: Exception) -> None:
        """The rows of a step cannot be read."""
        self._record.expect(False, f"step {step.event.number}: {error}")

    @property
    def results(self) -> list[Check]:
        """What came out."""
        for occurrence, groups in self._groups.items():
            names = ", ".join(sorted(groups))
            self._once.expect(len(groups) == 1, f"{occurrence.name} was trained by {len(groups)} groups: {names}")
        examiners = (self._record, self._version, self._probability, self._staleness, self._once, self._counts)
        results = [examiner.result for examiner in examiners]
        return [*results, self._routing.result] if self._records_routes else results

    def _examine(self, row: TrainedRow, bounds: StalenessConfig) -> None:
        used = row.in_gradient
        self._examine_record(row)
        if not used.any():
            return
        self._examine_versions(row, used)
        count = int(used.sum())
        behaviour = row.branch.logprobs[row.sampled_index][used]
        finite = np.isfinite(behaviour) & np.isfinite(row.outcome.trainer_logprobs[used])
        self._probability.expect(bool(finite.all()), f"{row.where}: {int((~finite).sum())} tokens without", count=count)
        for ages, bound, name in (
            (row.ages[used], bounds.max_staleness, "age"),
            (row.kv_ages[used], bounds.kv_bound, "KV age"),
        ):
            self._staleness.expect(
                bool((ages >= 0).all() and (ages <= bound).all()),
                f"{row.where}: {name} {int(ages.min())} to {int(ages.max())}, allowed 0 to {bound}",
                count=count if name == "age" else 0,
            )
        if self._records_routes:
            # A record's routes cover all its positions or it is refused when it is read.
            self._routing.expect(
                row.branch.routes is not None and row.outcome.route_changes is not None,
                f"{row.where}: {count} tokens without expert routes",
                count=count,
            )
        self._examine_uses(row, row.outcome.positions[used])

    def _examine_record(self, row: TrainedRow) -> None:
        header, seq = row.header, row.stored.entry.seq
        self._tokenizers.add(header.tokenizer)
        self._record.expect(
            seq in self._lineage and seq < row.seq, f"{row.where}: its record (event {seq}) is undone or came later"
        )
        if row.in_gradient.any():
            self._record.expect(isinstance(header.reward, Graded), f"{row.where}: trained and ungraded", count=0)
        self._record.expect(len(self._tokenizers) == 1, f"{row.where}: another tokenizer or chat template", count=0)

    def _examine_versions(self, row: TrainedRow, used: np.ndarray) -> None:
        by_number = {version.number: version for version in row.stored.trajectory.payload.versions}
        positions, places = row.outcome.positions[used], row.sampled_index[used]
        unknown: list[str] = []
        for turn in row.branch.turns:
            its = places[(positions >= turn.start) & (positions < turn.end)]
            for number in np.union1d(row.branch.policy_version[its], row.branch.kv_version[its]):
                version = by_number[int(number)]
                if (turn.engine, version) not in self._served:
                    unknown.append(f"{version.name} {version.digest[:12]} on {turn.engine}")
        self._version.expect(not unknown, f"{row.where}: never proven: {', '.join(unknown)}", count=int(used.sum()))

    def _examine_uses(self, row: TrainedRow, positions: np.ndarray) -> None:
        key = (row.header.id, row.outcome.branch)
        seen = self._trained.setdefault(key, np.zeros(len(row.branch.token_ids), dtype=bool))
        again = int(seen[positions].sum()) + len(positions) - len(np.unique(positions))
        self._once.expect(again == 0, f"{row.where}: {again} tokens were trained before", count=len(positions))
        seen[positions] = True
        self._groups[row.header.occurrence].add(row.header.group)
