"""The rows of steps joined with the records they were made from. N tokens with loss of a row, T of its branch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fathom.core.errors import LedgerError
from fathom.core.ids import TrajectoryId
from fathom.core.records.step import RowOutcome
from fathom.core.records.trajectory import TokenBranch, TrajectoryHeader
from fathom.ledger.entries import Recorded, StoredTrajectory
from fathom.ledger.events import StepTaken
from fathom.ledger.reader import LedgerReader


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """One row of one step."""

    seq: int
    """The `StepTaken`."""
    step: StepTaken
    """The step."""
    outcome: RowOutcome
    """What happened to its tokens."""
    stored: StoredTrajectory
    """The trajectory, verified against its content hash."""
    sampled_index: np.ndarray
    """int64 [N]: place of each token among the branch's sampled ones, which have versions and log-probabilities."""

    @property
    def header(self) -> TrajectoryHeader:
        """The trajectory's header."""
        return self.stored.trajectory.header

    @property
    def branch(self) -> TokenBranch:
        """The branch it was made from."""
        return self.stored.trajectory.payload.branches[self.outcome.branch]

    @property
    def in_gradient(self) -> np.ndarray:
        """bool [N]: tokens that had a gradient, which none has in a step without effect."""
        return (self.outcome.mask_codes == -1) & self.step.stepped

    @property
    def ages(self) -> np.ndarray:
        """int64 [N]: the trainer's version before the step minus the token's."""
        return self.step.number - 1 - self.branch.policy_version[self.sampled_index].astype(np.int64)

    @property
    def kv_ages(self) -> np.ndarray:
        """int64 [N]: the same for the oldest version behind its context."""
        return self.step.number - 1 - self.branch.kv_version[self.sampled_index].astype(np.int64)

    @property
    def where(self) -> str:
        """For messages."""
        return f"step {self.step.number}, {self.header.id} branch {self.outcome.branch}"


def trained_rows(reader: LedgerReader, step: Recorded[StepTaken]) -> Iterator[TrainedRow]:
    """The rows of a step, in batch order.

    Raises:
        LedgerError: a row's trajectory is missing or damaged, or has no loss where the row says it has.
    """
    known: dict[TrajectoryId, StoredTrajectory] = {}
    for outcome in reader.outcomes(step.seq):
        if outcome.trajectory not in known:
            known[outcome.trajectory] = reader.trajectory(outcome.trajectory)
        stored = known[outcome.trajectory]
        yield TrainedRow(
            seq=step.seq,
            step=step.event,
            outcome=outcome,
            stored=stored,
            sampled_index=_sampled_index(outcome, stored, f"step {step.event.number}, {outcome.trajectory}"),
        )


def _sampled_index(outcome: RowOutcome, stored: StoredTrajectory, where: str) -> np.ndarray:
    branches, positions = stored.trajectory.payload.branches, outcome.positions
    if not 0 <= outcome.branch < len(branches):
        raise LedgerError(f"{where}: there is no branch {outcome.branch}")
    branch = branches[outcome.branch]
    if len(positions) and (positions.min() < 0 or positions.max() >= len(branch.token_ids)):
        raise LedgerError(f"{where}: a position lies outside branch {outcome.branch}")
    if not branch.loss_mask[positions].all():
        raise LedgerError(f"{where}: a token of branch {outcome.branch} was trained that has no loss in its record")
    return (np.cumsum(branch.sampled) - 1)[positions]
