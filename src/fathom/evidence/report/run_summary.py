"""The summary of a run: plain numbers, ready for a table, a picture or JSON."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.core.records.step import Mismatch, RouteMetrics
from fathom.evidence.report.books_summary import BooksSummary, Fortune
from fathom.evidence.report.engines import EngineLife
from fathom.evidence.report.paired import PairedDifference
from fathom.evidence.report.teaching import TeachingSummary
from fathom.evidence.report.turns import TurnsSummary
from fathom.evidence.run_state import RunState
from fathom.evidence.worst import NormJudged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step, for curves."""

    number: int
    """Its number."""
    at_s: float
    """Seconds since the run's first event."""
    stepped: bool
    """False: the weights did not change."""
    reward_mean: float | None
    """Mean reward of its batch. None: none graded."""
    tokens: int
    """Tokens in the gradient."""
    rows: int
    """Rows."""
    step_s: float
    """Seconds it took."""
    waited_s: float
    """Seconds the trainer waited for its batch."""
    age_mean: float | None
    """Mean age of its tokens. None: no tokens."""
    age_max: int | None
    """Largest age. None: no tokens."""
    kv_age_max: int | None
    """Largest KV age. None: no tokens."""
    mismatch: Mismatch | None
    """Mismatch over its tokens. None: no tokens."""
    explained_variance: float | None
    """How much of the returns the critic knew. None: there is no critic, or the returns do not vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeCount:
    """Tokens of one age."""

    age: int
    """Age at the step."""
    kv_age: int
    """KV age at the step."""
    mismatch: Mismatch
    """Mismatch of these tokens over all steps; `tokens` is how many, percentiles are token-weighted means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPoint:
    """Engine against trainer at one and the same version."""

    version: int
    """The version."""
    mismatch: Mismatch
    """Over the recorded rows scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationSummary:
    """Weights on the move. Seconds are means over publications and their maximum."""

    count: int
    """Publications."""
    size_bytes: int
    """Bytes of the newest one."""
    write_s: float
    """Mean seconds to digest the version and make it readable."""
    deliver_s: float
    """Mean seconds from stage to commit."""
    deliver_max_s: float
    """Longest."""
    pause_s: float
    """Mean seconds without generation."""
    pause_max_s: float
    """Longest."""
    fenced: int
    """Engines fenced, all publications together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One evaluation."""

    version: int
    """The version."""
    tasks: int
    """Held-out tasks."""
    samples: int
    """Samples per task."""
    pass_at: int
    """k."""
    pass_rate: float
    """pass@k."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""
    reward_mean: float
    """Mean reward."""
    ungraded: int
    """Samples without a reward."""
    tokens_mean: float | None
    """Mean sampled tokens of an answer, over tasks. None: nothing was graded, or its ledger is older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCount:
    """Infrastructure failures of one kind."""

    component: str
    """Which component."""
    kind: str
    """Which kind."""
    count: int
    """How many."""
    last_detail: str
    """What the newest one said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Speed of the work that survives: from the first publication to the last step of each incarnation's part.

    Evaluations and checkpoints in between count; warm start, undone work and the time between incarnations do not.
    """

    seconds: float
    """Wall-clock seconds of these parts together."""
    tokens_per_s: float
    """Tokens in the gradient per second."""
    sampled_tokens_per_s: float
    """Sampled tokens per second."""
    trainer_busy: float
    """Share of this time that the trainer spent in steps."""
    trainer_waiting: float
    """Share that it waited for a batch."""
    ledger_share: float
    """Share spent writing the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """All numbers of one run."""

    state: RunState
    """How it stands."""
    incarnations: int
    """Times it was started or resumed."""
    started_s: float
    """Wall-clock time of its first event."""
    warm_start: tuple[int, float] | None
    """Supervised steps and the last loss. None: there was no warm start."""
    steps: tuple[StepPoint, ...]
    """Every step."""
    unusual: tuple[NormJudged, ...]
    """Steps whose gradient norm was out of the ordinary (`fathom trace --worst`)."""
    evaluations: tuple[EvaluationPoint, ...]
    """Every evaluation."""
    before_after: PairedDifference | None
    """First evaluation against the last, paired by task. None: fewer than two of the same tasks."""
    lengths: PairedDifference | None
    """The same of the sampled tokens of an answer. None: fewer than two evaluations with them."""
    teaching: TeachingSummary | None
    """What was learned from teachers. None: there are none."""
    books: BooksSummary
    """The three books."""
    fortunes: tuple[Fortune, ...]
    """Lengths and latencies of trajectories by how they ended, side by side."""
    ages: tuple[AgeCount, ...]
    """Tokens and mismatch by (age, KV age)."""
    mismatch: Mismatch | None
    """Over all tokens of all steps. None: no tokens."""
    routes: RouteMetrics | None
    """Expert routes over all steps. None: no row trained has any."""
    gaps: tuple[GapPoint, ...]
    """The same-version gap at each publication that measured it."""
    publications: PublicationSummary | None
    """None: nothing was published."""
    throughput: Throughput | None
    """None: no step was taken."""
    drafted_tokens: int
    """Tokens that speculation drafted. 0: it was off."""
    accepted_tokens: int
    """Of those, tokens that saved a forward."""
    in_flight: tuple[tuple[float, int], ...]
    """Seconds since the run's first event, and trajectories in flight then; about once a second."""
    turns: TurnsSummary | None
    """Turns and prefix cache. None: the tasks are single-turn."""
    ungraded: tuple[tuple[str, int], ...]
    """Causes for which trajectories have no reward, and how many have each; the most frequent first."""
    engines: tuple[EngineLife, ...]
    """Every engine and what became of it, undone work included."""
    faults: tuple[FaultCount, ...]
    """Infrastructure failures, undone ones included."""
