"""Sums up a run that tunes, from its ledger alone. All of it is about the surviving lineage."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.evidence.contracts.audit import AuditReport
from fathom.evidence.contracts.check import Check, Examiner
from fathom.evidence.report.paired import PairedDifference, paired_difference
from fathom.evidence.run_state import RunState, state_of
from fathom.evidence.worst import NormJudged, judge_norms
from fathom.ledger.entries import Recorded
from fathom.ledger.events import IncarnationOpened, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import (
    ModelSaved,
    PreferenceEvaluated,
    PreferenceStepped,
    ReferenceScored,
    SupervisedEvaluated,
    SupervisedStepped,
    TuningPrepared,
)

Step = SupervisedStepped | PreferenceStepped


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCount:
    """A pass over the samples."""

    epoch: int
    """From 0."""
    trained: int
    """Different samples trained in it."""
    of: int
    """Samples there are."""
    steps: int
    """Steps it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSummary:
    """A run of supervised fine-tuning or of preference training."""

    state: RunState
    """How it stands."""
    incarnations: int
    """How often it was started or resumed."""
    started_s: float
    """Wall-clock time of its first event."""
    prepared: TuningPrepared
    """What became of its rows."""
    warm_start: tuple[int, float] | None
    """Steps before it, and the last one's loss. None: none."""
    reference: ReferenceScored | None
    """Of preference training."""
    supervised: tuple[SupervisedStepped, ...]
    """Steps on conversations."""
    preference: tuple[PreferenceStepped, ...]
    """Steps on pairs."""
    supervised_evaluations: tuple[SupervisedEvaluated, ...]
    """Held-out conversations, scored."""
    preference_evaluations: tuple[PreferenceEvaluated, ...]
    """Held-out pairs, scored."""
    unusual: tuple[NormJudged, ...]
    """Steps whose gradient norm was out of the ordinary (`fathom trace --worst`)."""
    differences: tuple[tuple[str, PairedDifference], ...]
    """After - before of what was measured on the same held-out samples, by name."""
    epochs: tuple[EpochCount, ...]
    """The passes over the samples."""
    books: Check
    """Each sample trained exactly once an epoch."""
    tokens_per_s: float
    """Tokens of forwards, context included, by second spent in steps."""
    model: ModelSaved | None
    """The model it left. None: not yet."""


def is_tuning(reader: LedgerReader) -> bool:
    """Whether a ledger is of such a run."""
    return reader.latest(TuningPrepared) is not None


def summarise_tuning(reader: LedgerReader) -> TuningSummary:
    """Read a run's ledger, which may still be written. It must be one of `is_tuning`."""
    prepared = reader.latest(TuningPrepared)
    assert prepared is not None, "asked before"
    opened = reader.events(IncarnationOpened, include_undone=True)
    warm = reader.events(WarmStartStepped)
    reference, model = reader.latest(ReferenceScored), reader.latest(ModelSaved)
    supervised = tuple(entry.event for entry in reader.events(SupervisedStepped))
    preference = tuple(entry.event for entry in reader.events(PreferenceStepped))
    conversations = tuple(entry.event for entry in reader.events(SupervisedEvaluated))
    pairs = tuple(entry.event for entry in reader.events(PreferenceEvaluated))
    steps: tuple[Step, ...] = supervised or preference
    seconds = sum(step.step_s for step in steps)
    return TuningSummary(
        state=state_of(reader),
        incarnations=len(opened),
        started_s=opened[0].at_s if opened else 0.0,
        prepared=prepared.event,
        warm_start=(warm[-1].event.step, warm[-1].event.loss) if warm else None,
        reference=reference.event if reference else None,
        supervised=supervised,
        preference=preference,
        supervised_evaluations=conversations,
        preference_evaluations=pairs,
        unusual=tuple(norm for norm in judge_norms(steps) if norm.anomalous),
        differences=(*_of_conversations(conversations), *_of_pairs(pairs)),
        epochs=_epochs(steps, prepared.event.samples),
        books=_books(steps, prepared.event),
        tokens_per_s=sum(step.forward_tokens for step in steps) / seconds if seconds else 0.0,
        model=model.event if model else None,
    )


def audit_tuning(reader: LedgerReader) -> AuditReport:
    """Examine the surviving lineage of such a run."""
    supervised: list[Recorded[SupervisedStepped]] = reader.events(SupervisedStepped)
    preference: list[Recorded[PreferenceStepped]] = reader.events(PreferenceStepped)
    steps: list[Step] = [entry.event for entry in supervised] or [entry.event for entry in preference]
    prepared = [entry.event for entry in reader.events(TuningPrepared)]
    same = Examiner("data", "every incarnation trained on the same samples in the same order")
    for facts in prepared:
        same.expect(facts.digest == prepared[0].digest, f"digest {facts.digest[:16]} is not {prepared[0].digest[:16]}")
        held_out, first = facts.held_out_digest, prepared[0].held_out_digest
        same.expect(held_out == first or not first, f"held-out digest {held_out[:16]} is not {first[:16]}", count=0)
    numbers = Examiner("steps", "steps are numbered from 1 without a gap")
    for expected, step in enumerate(steps, start=1):
        numbers.expect(step.number == expected, f"step {step.number} stands in the place of {expected}")
    finite = Examiner("finite", "no log-probability was refused")
    for step in steps:
        finite.expect(not step.non_finite, f"step {step.number} refused {step.non_finite}")
    checks = (_books(steps, prepared[-1]), same.result, numbers.result, finite.result)
    return AuditReport(last_seq=reader.last_seq, steps=len(steps), checks=checks)


def _books(steps: tuple[Step, ...] | list[Step], prepared: TuningPrepared) -> Check:
    """An epoch that is over has trained every sample; none has trained one twice."""
    examiner = Examiner(
        "samples", "each sample is trained exactly once in an epoch, and in no epoch before the last is over"
    )
    seen: dict[int, set[int]] = {}
    for step in steps:
        known = seen.setdefault(step.epoch, set())
        twice = len(step.samples) - len(set(step.samples) - known)
        beyond = [place for place in step.samples if not 0 <= place < prepared.samples]
        examiner.expect(not twice, f"step {step.number} trains {twice} samples again", count=len(step.samples))
        examiner.expect(not beyond, f"step {step.number} trains samples {beyond[:3]} that there are not", count=0)
        known.update(step.samples)
    for epoch in sorted(seen)[:-1]:
        missing = prepared.samples - len(seen[epoch])
        examiner.expect(not missing, f"epoch {epoch} ended without {missing} samples", count=0)
    return examiner.result


def _epochs(steps: tuple[Step, ...], samples: int) -> tuple[EpochCount, ...]:
    found: dict[int, list[Step]] = {}
    for step in steps:
        found.setdefault(step.epoch, []).append(step)
    return tuple(
        EpochCount(
            epoch=epoch,
            trained=len({place for step in taken for place in step.samples}),
            of=samples,
            steps=len(taken),
        )
        for epoch, taken in found.items()
    )


def _of_conversations(points: tuple[SupervisedEvaluated, ...]) -> list[tuple[str, PairedDifference]]:
    if len(points) < 2:
        return []
    first, last = points[0], points[-1]
    return _named(
        ("loss of a token", paired_difference(first.per_sample, last.per_sample)),
        ("probability of an answer", paired_difference(first.probabilities, last.probabilities)),
    )


def _of_pairs(points: tuple[PreferenceEvaluated, ...]) -> list[tuple[str, PairedDifference]]:
    if len(points) < 2:
        return []
    first, last = points[0], points[-1]
    likelier = [[float(odds > 0) for odds in point.log_odds] for point in (first, last)]
    return _named(
        ("chosen is likelier", paired_difference(*likelier)),
        ("probability of chosen", paired_difference(first.chosen_probabilities, last.chosen_probabilities)),
    )


def _named(*found: tuple[str, PairedDifference | None]) -> list[tuple[str, PairedDifference]]:
    return [(name, difference) for name, difference in found if difference is not None]
