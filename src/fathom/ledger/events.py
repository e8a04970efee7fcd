"""The typed history of a run. Each event is one fact, written once, never changed."""

from __future__ import annotations

import msgspec

from fathom.core.adapter import AdapterIdentity, MergeRounding
from fathom.core.ids import GroupId, Occurrence, PolicyVersion, TaskId, TrajectoryId
from fathom.core.records.scores import DistillationMetrics
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import Mismatch, MismatchSlice, RouteMetrics, RowOutcome, StepMetrics
from fathom.ledger.tuning_events import TuningEvent


class IncarnationOpened(msgspec.Struct, frozen=True, tag="incarnation_opened.1"):
    """The run was started or resumed."""

    incarnation: int
    """From 1."""
    parent_seq: int | None
    """Last event of the history it goes on from; later ones of that history are undone. None: a fresh run."""
    start_step: int
    """Optimizer steps behind the weights it starts from."""
    config: str
    """The resolved config as JSON."""
    machine: str
    """Machine class and library versions as JSON."""


class GroupStarted(msgspec.Struct, frozen=True, tag="group_started.1"):
    """All members of a group were dispatched."""

    group: GroupId
    """The group."""
    occurrence: Occurrence
    """The occurrence."""
    attempt: int
    """Attempt at the occurrence, from 0."""
    task: TaskId
    """The task."""
    members: tuple[TrajectoryId, ...]
    """Its trajectories."""
    version: int
    """Number of the version that served at dispatch."""


class TrajectoryEnded(msgspec.Struct, frozen=True, tag="trajectory_ended.1"):
    """A trajectory's record lies in the container (header and arrays are indexed by its id)."""

    trajectory: TrajectoryId
    """The trajectory."""
    arrival_age: int | None
    """Trainer's version at arrival minus its oldest token's. None: nothing was sampled."""
    sampled_tokens: int
    """Sampled tokens."""
    prompt_tokens: int
    """Prompt tokens of its calls."""
    cached_tokens: int
    """Of those, from a prefix cache."""
    drafted_tokens: int
    """Tokens guessed by speculation and checked by the model."""
    accepted_tokens: int
    """Of those, guesses that were right and saved a forward."""
    turns: int = 1
    """Its calls."""
    known_tokens: int = 0
    """Prompt tokens that an earlier call of its own had computed: what a perfect prefix cache of its own would give."""
    ungraded: str = ""
    """Cause for which it has no reward. Empty: it has one, or its ledger is older than this field."""


class AttemptMoved(msgspec.Struct, frozen=True, tag="attempt_moved.1"):
    """A trajectory changed its state in the attempts book."""

    trajectory: TrajectoryId
    """The trajectory."""
    state: AttemptState
    """Its new state."""
    fate: Fate | None
    """Why. None: buffered or trained."""
    detail: str
    """For people; may be empty."""
    at_step: int
    """Trainer's version then."""


class OccurrenceClosed(msgspec.Struct, frozen=True, tag="occurrence_closed.1"):
    """An occurrence was trained or given up."""

    occurrence: Occurrence
    """The occurrence."""
    group: GroupId
    """The attempt that decided it."""
    trained: bool
    """False: given up."""
    fate: Fate | None
    """Why it was given up. None: trained."""


class GroupDequeued(msgspec.Struct, frozen=True, tag="group_dequeued.1"):
    """A group left the buffer for a batch."""

    group: GroupId
    """The group."""
    age: int | None
    """Trainer's version minus its oldest token's, at dequeue. None: it has no tokens."""
    waited_s: float
    """Seconds in the buffer."""


class LoopSampled(msgspec.Struct, frozen=True, tag="loop_sampled.1"):
    """How the loop stood at a moment (once per batch and at most once a second in between)."""

    in_flight_trajectories: int
    """Trajectories running."""
    in_flight_groups: int
    """Groups running."""
    buffered_groups: int
    """Finished groups waiting."""
    oldest_version: int | None
    """Oldest version among them. None: none."""
    trainer_waits_for: str
    """What the trainer waits for; empty while it trains."""
    source_waits_for: str
    """What admission waits for; empty while it admits."""


class StepTaken(msgspec.Struct, frozen=True, tag="step_taken.1"):
    """An optimizer step. Row arrays lie in the container under its number."""

    number: int
    """The version it made, or would have made."""
    stepped: bool
    """False: the weights did not change."""
    why_not: str
    """Why. Empty when stepped."""
    metrics: StepMetrics
    """Its numbers."""
    mismatch: Mismatch | None
    """Over all tokens. None: no tokens."""
    slices: tuple[MismatchSlice, ...]
    """By (age, KV age)."""
    reward_mean: float | None
    """Mean reward of the graded members of the batch's groups. None: none graded."""
    weights_digest: str
    """Root digest of the cast weights after the step."""
    waited_s: float
    """Seconds the trainer waited for the batch."""
    routes: RouteMetrics | None = None
    """Expert routes. None: no row trained has any."""
    distillation: DistillationMetrics | None = None
    """What was learned from teachers. None: there are none."""
    reference: str | None = None
    """Root digest (hex) of the weights of the KL reference that the step used. None: it used none."""


class StepRows(msgspec.Struct, frozen=True, tag="step_rows.1"):
    """The rows of one step, as they lie in the container beside its `StepTaken`."""

    rows: tuple[RowOutcome, ...]
    """In batch order."""


class Published(msgspec.Struct, frozen=True, tag="published.2"):
    """A version was committed."""

    version: PolicyVersion
    """The version."""
    parent: PolicyVersion | None
    """What served before."""
    transport: str
    """How it travelled."""
    size_bytes: int
    """Bytes of the version."""
    moved_bytes: int
    """Bytes that travelled, to all engines that took it."""
    write_s: float
    """Seconds to take the version's bytes; where it went out coded, to code and digest it too."""
    stage_s: float
    """Seconds to stage, the slowest engine."""
    verify_s: float
    """Seconds to verify, the slowest engine."""
    commit_s: float
    """Seconds to commit, the slowest engine."""
    pause_s: float
    """Seconds without generation, the slowest engine."""
    committed: tuple[str, ...]
    """Engines that serve it."""
    fenced: tuple[str, ...]
    """Engines that failed and were fenced."""
    gap: Mismatch | None
    """Same-version gap: engine against trainer on recorded rows at this version. None: not measured."""
    cast_digest: str | None = None
    """Digest of the cast that the step left, where a quantiser made the version of it. None: they are the same."""
    adapter: AdapterIdentity | None = None
    """The LoRA adapter that it is of, and its base. None: it is a whole model."""
    merging: MergeRounding | None = None
    """What was lost where an adapter was merged into the whole model. None: nothing was merged."""


class EngineJoined(msgspec.Struct, frozen=True, tag="engine_joined.1"):
    """An engine belongs to the fleet from here on. It gets requests once it holds a version."""

    engine: str
    """The engine."""
    asked: bool
    """True: it was asked for while the run went on. False: it was started with the run."""
    version: PolicyVersion | None
    """What it holds, by a full verified load. None: nothing is published yet."""
    seconds: float
    """Seconds to start it and to load the version."""


class EngineServes(msgspec.Struct, frozen=True, tag="engine_serves.1"):
    """An engine was proven to hold a version, and has confirmed that it serves it from here on."""

    engine: str
    """The engine."""
    version: PolicyVersion
    """The version."""


class EngineFenced(msgspec.Struct, frozen=True, tag="engine_fenced.1"):
    """An engine gets no requests from here on; what it had not finished is discarded."""

    engine: str
    """The engine."""
    reason: str
    """Why."""
    discarded: int
    """Generations it had not finished."""


class EngineRestored(msgspec.Struct, frozen=True, tag="engine_restored.1"):
    """A fenced engine was replaced by a new process and serves after a full verified reload."""

    engine: str
    """The engine."""
    version: PolicyVersion | None
    """What it holds. None: nothing is published yet."""
    seconds: float
    """Seconds since it was fenced."""
    tries: int
    """Processes started until one could be loaded."""


class EngineLeft(msgspec.Struct, frozen=True, tag="engine_left.1"):
    """An engine belongs to the fleet no longer."""

    engine: str
    """The engine."""
    reason: str
    """Why."""
    discarded: int
    """Generations it had not finished when its time to drain was over."""
    seconds: float
    """Seconds it drained."""


class PublicationCancelled(msgspec.Struct, frozen=True, tag="publication_cancelled.1"):
    """A payload fault: the parent goes on serving."""

    version: PolicyVersion
    """The version that was not delivered."""
    reason: str
    """Why."""


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated.1"):
    """An evaluation at one pinned version."""

    version: PolicyVersion
    """The version."""
    tasks: int
    """Held-out tasks."""
    samples: int
    """Samples per task."""
    pass_at: int
    """k."""
    pass_rate: float
    """pass@k over the tasks."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""
    reward_mean: float
    """Mean reward of the graded samples."""
    ungraded: int
    """Samples without a reward; they are in no mean."""
    per_task: tuple[float, ...]
    """Mean reward per task, in task order, for paired comparisons; NaN where nothing was graded."""
    seconds: float
    """Seconds it took."""
    tokens_per_task: tuple[float, ...] = ()
    """Mean sampled tokens of an answer per task, in task order, over its graded samples; NaN where nothing was graded.
    Empty: its ledger is older than this field."""


class DemonstrationsPlayed(msgspec.Struct, frozen=True, tag="demonstrations_played.1"):
    """Agents have played scripts for the warm start, so far."""

    played: int
    """Episodes that were played to their end, with a reward."""
    of: int
    """Episodes to play."""
    tokens: int
    """Tokens in them to imitate."""
    seconds: float
    """Since the first began."""


class WarmStartStepped(msgspec.Struct, frozen=True, tag="warm_start_stepped.1"):
    """A supervised step before RL; its own counter."""

    step: int
    """From 1."""
    loss: float
    """Token-mean negative log-likelihood."""
    tokens: int
    """Tokens imitated."""


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint_saved.1"):
    """A checkpoint is whole on disk."""

    step: int
    """Optimizer steps behind it."""
    path: str
    """Folder, relative to the run's."""
    seconds: float
    """Seconds it took."""


class FaultSeen(msgspec.Struct, frozen=True, tag="fault_seen.1"):
    """An infrastructure failure, typed at the boundary. Never a reward."""

    component: str
    """Which component."""
    kind: str
    """Kind of error."""
    detail: str
    """What a person needs."""


class RunEnded(msgspec.Struct, frozen=True, tag="run_ended.1"):
    """This incarnation ended by itself."""

    reason: str
    """`steps`, `data`, `interrupted`, or the error."""
    step: int
    """Optimizer steps taken."""


Event = (
    IncarnationOpened
    | GroupStarted
    | TrajectoryEnded
    | AttemptMoved
    | OccurrenceClosed
    | GroupDequeued
    | LoopSampled
    | StepTaken
    | Published
    | PublicationCancelled
    | EngineJoined
    | EngineServes
    | EngineFenced
    | EngineRestored
    | EngineLeft
    | Evaluated
    | DemonstrationsPlayed
    | WarmStartStepped
    | CheckpointSaved
    | FaultSeen
    | TuningEvent
    | RunEnded
)
"""Every kind of event."""
