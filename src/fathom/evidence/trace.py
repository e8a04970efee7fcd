"""Where each token came from and what a step made of it. One line per sampled token, ready to be shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fathom.core.errors import LedgerError
from fathom.core.ids import GroupId, TaskId, TrajectoryId
from fathom.core.records.step import MaskReason, RowOutcome
from fathom.core.records.trajectory import Graded, TokenBranch, TrajectoryStatus
from fathom.ledger.entries import Recorded, StoredTrajectory
from fathom.ledger.events import AttemptMoved, StepTaken
from fathom.ledger.reader import LedgerReader

_REASONS = tuple(MaskReason)
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """One sampled token."""

    position: int
    """Its index in the branch."""
    token_id: int
    """The id as sampled."""
    version: int
    """Number of the version that produced it."""
    kv_version: int
    """Number of the oldest version behind its context."""
    logprob: float
    """Behaviour log-probability."""
    trainer_logprob: float | None
    """Trainer's log-probability before the first step on its batch. None: no step used it."""
    ratio: float | None
    """Trainer's over behaviour probability. None: no step used it."""
    weight: float | None
    """Correction weight. None: no step used it."""
    in_gradient: bool
    """It had a gradient."""
    reason: str
    """Why it had none. Empty when it had one."""
    route_changes: int | None
    """Layers in which the trainer chose other experts than recorded, for the input before it. None: not compared."""
    mixed_routes: bool | None
    """A route before it was recorded under an older version than its own. None: no routes are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTrace:
    """One branch of a trajectory, as one step used it or as no step did."""

    step: int | None
    """The step. None: no step on the surviving lineage used it."""
    trajectory: TrajectoryId
    """The trajectory."""
    group: GroupId
    """Its group."""
    task: TaskId
    """Its task."""
    status: TrajectoryStatus
    """How it ended."""
    reward: float | None
    """Its reward. None: ungraded."""
    ungraded: str
    """Why there is no reward; empty when there is one."""
    advantage: float | None
    """Its advantage. None: no step used it."""
    branch: int
    """The branch."""
    engine: str
    """Who sampled it, in what element type and kernel mode."""
    versions: tuple[str, ...]
    """Versions behind it with their digests, oldest first."""
    content_hash: str
    """BLAKE3 (hex) of the record."""
    prompt_ids: tuple[int, ...]
    """Ids before the first sampled token."""
    route_layers: int | None
    """Layers with recorded expert routes. None: no routes are recorded."""
    tokens: tuple[TokenTrace, ...]
    """Its sampled tokens; those shared with a parent branch are listed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    step: StepTaken
    outcome: RowOutcome


def trace_step(reader: LedgerReader, step: int | None = None, *, limit: int | None = None) -> list[BranchTrace]:
    """The rows of a step (None: the newest), at most `limit`; those of steps of its number without effect come after
    them. Raises LedgerError when there is no such step."""
    taken: dict[int, list[Recorded[StepTaken]]] = {}
    for entry in reader.events(StepTaken):
        taken.setdefault(entry.event.number, []).insert(0, entry)
    if not taken:
        raise LedgerError("no step has been taken yet")
    number = max(taken) if step is None else step
    if number not in taken:
        raise LedgerError(f"there is no step {number}; the run has steps {min(taken)} to {max(taken)}")
    uses = [
        _Use(step=entry.event, outcome=outcome) for entry in taken[number] for outcome in reader.outcomes(entry.seq)
    ]
    return [_trace(reader.trajectory(use.outcome.trajectory), use.outcome.branch, use, "") for use in uses[:limit]]


def trace_trajectory(reader: LedgerReader, name: TrajectoryId) -> list[BranchTrace]:
    """All branches of a trajectory, undone ones included. Raises LedgerError when it is unknown or damaged."""
    stored = reader.trajectory(name)
    steps = {entry.seq: entry.event for entry in reader.events(StepTaken)}
    uses = {
        use.branch: _Use(step=steps[use.seq], outcome=reader.outcomes(use.seq)[use.place])
        for use in reader.rows_of(name)
    }
    fate = _fate(reader, stored)
    branches = range(len(stored.trajectory.payload.branches))
    return [_trace(stored, branch, uses.get(branch), fate) for branch in branches]


def _fate(reader: LedgerReader, stored: StoredTrajectory) -> str:
    """Why no step used it."""
    if stored.entry.seq not in reader.lineage():
        return "undone by a resume"
    moves = [move.event for move in reader.events(AttemptMoved) if move.event.trajectory == stored.entry.id]
    if not moves:
        return "in flight"
    return f"{moves[-1].state}: {moves[-1].fate}" if moves[-1].fate else str(moves[-1].state)


def _trace(stored: StoredTrajectory, index: int, use: _Use | None, unused: str) -> BranchTrace:
    header, payload = stored.trajectory.header, stored.trajectory.payload
    branch = payload.branches[index]
    sampled = np.flatnonzero(branch.sampled)
    places = {} if use is None else {int(position): place for place, position in enumerate(use.outcome.positions)}
    return BranchTrace(
        step=use.step.number if use else None,
        trajectory=header.id,
        group=header.group,
        task=header.task,
        status=header.status,
        reward=stored.entry.reward,
        ungraded="" if isinstance(header.reward, Graded) else f"{header.reward.cause}: {header.reward.detail}",
        advantage=use.outcome.advantage if use else None,
        branch=index,
        engine=", ".join(sorted({f"{turn.engine} {turn.dtype} {turn.kernels}" for turn in branch.turns})),
        versions=tuple(f"{version.name} {version.digest[:12]}" for version in payload.versions),
        content_hash=stored.entry.content_hash,
        prompt_ids=tuple(branch.token_ids[: sampled[0] if len(sampled) else None].tolist()),
        route_layers=branch.routes.shape[1] if branch.routes is not None else None,
        tokens=tuple(
            _token(branch, int(position), order, use, places.get(int(position)), unused)
            for order, position in enumerate(sampled)
            if position >= branch.shared_prefix
        ),
    )


def _token(
    branch: TokenBranch, position: int, order: int, use: _Use | None, place: int | None, unused: str
) -> TokenTrace:
    """The `order`-th sampled token of a branch; `place` is its place in the row that used it, if it has one."""
    logprob, trainer, weight, reason, changes = float(branch.logprobs[order]), None, None, unused, None
    if use is not None:
        reason = MaskReason.NO_LOSS.value
        if place is not None:
            trainer, weight = float(use.outcome.trainer_logprobs[place]), float(use.outcome.weights[place])
            reason = _reason(int(use.outcome.mask_codes[place]), use.step)
            changes = int(use.outcome.route_changes[place]) if use.outcome.route_changes is not None else None
    return TokenTrace(
        position=position,
        token_id=int(branch.token_ids[position]),
        version=int(branch.policy_version[order]),
        kv_version=int(branch.kv_version[order]),
        logprob=logprob,
        trainer_logprob=trainer,
        ratio=None if trainer is None else math.exp(min(trainer - logprob, _LARGEST_EXPONENT)),
        weight=weight,
        in_gradient=not reason,
        reason=reason,
        route_changes=changes,
        mixed_routes=bool(branch.mixed_routes[order]) if branch.routes is not None else None,
    )


def _reason(mask_code: int, step: StepTaken) -> str:
    if mask_code >= 0:
        return _REASONS[mask_code].value
    return "" if step.stepped else f"no step: {step.why_not}"
