"""The steps whose gradient was out of the ordinary, and the trajectories behind them.

The norm of a step (before clipping) is compared with those of the steps just before it: with their median, and by the
robust z of its logarithm, log norm - median, over 1.4826 times the median absolute deviation. The part of a trajectory
is its share of the step's sum of |weight x advantage| over the tokens in the gradient: what it could move, whatever its
own gradient is. Ids that are compared with a teacher, a KL and an entropy in the loss move weights without an advantage
and are in no share.

A run that tunes has samples in place of trajectories.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from fathom.core.errors import LedgerError
from fathom.core.ids import TaskId, TrajectoryId
from fathom.core.records.step import MaskReason, RowOutcome
from fathom.ledger.events import StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import PreferenceStepped, SupervisedStepped, TuningStepped

WINDOW = 50
"""Steps before one that it is compared with."""
FEWEST = 8
"""With fewer before it a step is compared with nothing."""
ANOMALOUS_RATIO = 3.0
"""A norm is anomalous from this many medians on ..."""
ANOMALOUS_Z = 6.0
"""... if its robust z is at least this too."""
_TO_DEVIATION = 1.4826
_SMALLEST_DEVIATION = 0.05
"""Of log norms: below 5 % nothing is called a deviation."""
_NON_FINITE = list(MaskReason).index(MaskReason.NON_FINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormJudged:
    """The gradient norm of a step beside those before it."""

    step: int
    """The step."""
    grad_norm: float
    """Global norm before clipping; may not be finite."""
    median: float | None
    """Median of the finite norms of up to 50 steps before it. None: there are fewer than 8."""
    ratio: float | None
    """The norm in medians. None: there is no median, or it is 0."""
    robust_z: float | None
    """Robust z of its logarithm. None: there is no median, or a norm is 0."""
    non_finite_tokens: int
    """Tokens (pairs, where those are trained) refused for a log-probability that is not finite."""
    why_not: str
    """Why the weights did not change. Empty: they did."""

    @property
    def anomalous(self) -> bool:
        """It is not finite, or far above those before it."""
        if not math.isfinite(self.grad_norm):
            return True
        if self.ratio is None or self.robust_z is None:
            return False
        return self.ratio >= ANOMALOUS_RATIO and self.robust_z >= ANOMALOUS_Z


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a trajectory had in a step."""

    trajectory: TrajectoryId
    """The trajectory."""
    task: TaskId
    """Its task."""
    reward: float | None
    """Its reward. None: ungraded."""
    advantage: float
    """Mean advantage over its tokens with loss."""
    share: float | None
    """Share of the step's sum of |weight x advantage|. None: that is 0, and something else moved the weights."""
    tokens: int
    """Its tokens in the gradient."""
    non_finite: int
    """Its tokens that were refused for a log-probability that is not finite."""
    largest_log_ratio: float | None
    """Largest |log trainer - log behaviour| of its tokens. None: none is finite."""
    largest_weight: float
    """Largest correction weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstStep:
    """A step, and the trajectories with the largest parts in it."""

    norm: NormJudged
    """Its norm."""
    anomalous: bool
    """The norm is out of the ordinary."""
    parts: tuple[Part, ...]
    """Those with refused tokens first, then by share, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstTuningStep:
    """A step of a run that tunes, and what it trained on."""

    norm: NormJudged
    """Its norm."""
    anomalous: bool
    """The norm is out of the ordinary."""
    epoch: int
    """Pass over the samples, from 0."""
    samples: tuple[int, ...]
    """Places of its samples among those trained on, from 0."""


def judge_norms(steps: Sequence[StepTaken] | Sequence[TuningStepped]) -> list[NormJudged]:
    """The norms of steps in the order they were taken. Steps without a token in the gradient are left out."""
    return [norm for _, norm in _judged(steps)]


def _judged(steps: Sequence[StepTaken] | Sequence[TuningStepped]) -> list[tuple[int, NormJudged]]:
    """The same, each with its place among the steps: one without effect leaves its number to the next."""
    before: deque[float] = deque(maxlen=WINDOW)
    judged: list[tuple[int, NormJudged]] = []
    for place, step in enumerate(map(_told, steps)):
        if step.tokens:
            judged.append((place, _judge(step, list(before))))
        elif step.non_finite:
            judged.append((place, _judge(step, [])))
        if step.tokens and math.isfinite(step.norm):
            before.append(step.norm)
    return judged


def worst_steps(reader: LedgerReader, count: int, *, parts: int = 3) -> list[WorstStep]:
    """The `count` steps furthest above those before them, worst first, each with its `parts` largest trajectories.

    Steps with refused tokens or a norm that is not finite come before all others. Raises LedgerError before the first
    step.
    """
    entries = reader.events(StepTaken)
    if not entries:
        raise LedgerError("no step has been taken yet; look again when the run has taken one")
    ranked = sorted(_judged([entry.event for entry in entries]), key=_badness, reverse=True)[:count]
    return [
        WorstStep(norm=norm, anomalous=norm.anomalous, parts=_parts(reader, entries[place].seq, parts))
        for place, norm in ranked
    ]


def worst_tuning_steps(reader: LedgerReader, count: int) -> list[WorstTuningStep]:
    """The same of a run that tunes. Raises LedgerError before the first step."""
    recorded = reader.events(SupervisedStepped) or reader.events(PreferenceStepped)
    steps = [entry.event for entry in recorded]
    if not steps:
        raise LedgerError("no step has been taken yet; look again when the run has taken one")
    ranked = sorted(_judged(steps), key=_badness, reverse=True)[:count]
    return [
        WorstTuningStep(norm=norm, anomalous=norm.anomalous, epoch=steps[place].epoch, samples=steps[place].samples)
        for place, norm in ranked
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a step tells of its gradient, whatever was trained."""

    number: int
    norm: float
    tokens: int
    non_finite: int
    why_not: str


def _told(step: StepTaken | TuningStepped) -> _Told:
    if isinstance(step, TuningStepped):
        tokens, refused = step.tokens, step.non_finite
        return _Told(number=step.number, norm=step.grad_norm, tokens=tokens, non_finite=refused, why_not="")
    metrics = step.metrics
    return _Told(
        number=step.number,
        norm=metrics.grad_norm,
        tokens=metrics.tokens,
        non_finite=metrics.non_finite_tokens,
        why_not=step.why_not,
    )


def _judge(step: _Told, before: list[float]) -> NormJudged:
    middle = median(before) if len(before) >= FEWEST else None
    return NormJudged(
        step=step.number,
        grad_norm=step.norm,
        median=middle,
        ratio=step.norm / middle if middle else None,
        robust_z=_robust_z(step.norm, before) if middle else None,
        non_finite_tokens=step.non_finite,
        why_not=step.why_not,
    )


def _robust_z(norm: float, before: list[float]) -> float | None:
    if not math.isfinite(norm) or norm <= 0 or min(before) <= 0:
        return None
    logs = [math.log(each) for each in before]
    middle = median(logs)
    deviation = _TO_DEVIATION * median([abs(each - middle) for each in logs])
    return (math.log(norm) - middle) / max(deviation, _SMALLEST_DEVIATION)


def _badness(judged: tuple[int, NormJudged]) -> tuple[bool, bool, bool, float, int]:
    """Later steps first among equals."""
    place, norm = judged
    z = norm.robust_z if norm.robust_z is not None else -math.inf
    return (not math.isfinite(norm.grad_norm), norm.non_finite_tokens > 0, norm.anomalous, z, place)


def _parts(reader: LedgerReader, seq: int, count: int) -> tuple[Part, ...]:
    by_trajectory: dict[TrajectoryId, list[RowOutcome]] = {}
    for row in reader.outcomes(seq):
        by_trajectory.setdefault(row.trajectory, []).append(row)
    masses = {name: sum(_mass(row) for row in rows) for name, rows in by_trajectory.items()}
    refused = {name: sum(_refused(row) for row in rows) for name, rows in by_trajectory.items()}
    chosen = sorted(by_trajectory, key=lambda name: (refused[name], masses[name]), reverse=True)[:count]
    total = sum(masses.values())
    return tuple(
        _part(reader, name, by_trajectory[name], masses[name] / total if total else None, refused[name])
        for name in chosen
    )


def _part(reader: LedgerReader, name: TrajectoryId, rows: list[RowOutcome], share: float | None, refused: int) -> Part:
    stored = reader.trajectory(name)
    branches = stored.trajectory.payload.branches
    ratios: list[np.ndarray] = []
    for row in rows:
        branch = branches[row.branch]
        order = (np.cumsum(branch.sampled) - 1)[row.positions]
        ratios.append(np.abs(row.trainer_logprobs - branch.logprobs[order]))
    log_ratios = np.concatenate(ratios)
    finite = log_ratios[np.isfinite(log_ratios)]
    return Part(
        trajectory=name,
        task=stored.trajectory.header.task,
        reward=stored.entry.reward,
        advantage=float(np.concatenate([_advantages(row) for row in rows]).mean(dtype=np.float64)),
        share=share,
        tokens=sum(int((row.mask_codes < 0).sum()) for row in rows),
        non_finite=refused,
        largest_log_ratio=float(finite.max()) if len(finite) else None,
        largest_weight=max(float(row.weights.max(initial=0.0)) for row in rows),
    )


def _advantages(row: RowOutcome) -> np.ndarray:
    return row.advantages if row.advantages is not None else np.full(len(row.positions), row.advantage)


def _mass(row: RowOutcome) -> float:
    here = row.mask_codes < 0
    return float(np.abs(row.weights[here] * _advantages(row)[here]).sum(dtype=np.float64))


def _refused(row: RowOutcome) -> int:
    return int((row.mask_codes == _NON_FINITE).sum())
