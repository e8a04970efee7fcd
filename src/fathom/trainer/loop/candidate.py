"""The rows of a batch with what their groups say of them, and which of them the clock lets through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.config.families import Advantage
from fathom.config.trainer import StalenessConfig
from fathom.core.errors import RecordError
from fathom.core.records.row import Row
from fathom.core.records.step import TrainBatch
from fathom.model.routing import ExpertShape
from fathom.trainer.objective.advantages import group_advantages


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A row that may be trained."""

    row: Row
    """The row."""
    advantage: float
    """Advantage of its trajectory, from all graded members of the group."""
    truncated: bool
    """Its trajectory ended as truncated."""
    routable: bool
    """Its expert routes are complete, or are not to be replayed."""
    taught: bool = True
    """A teacher has scored its tokens at their own temperatures, or none is needed."""
    old_logprobs: np.ndarray | None = None
    """float32 [N]: trainer's log-probabilities before the first step on the batch. None: no pass was made for it."""
    ref_logprobs: np.ndarray | None = None
    """float32 [N]: the reference's at that time, where its KL is part of the reward. None: it is not."""
    values: np.ndarray | None = None
    """float32 [N]: the critic's values at that time. None: there is no critic."""
    advantages: np.ndarray | None = None
    """float32 [N]: advantages of its tokens. None: all have the trajectory's."""
    returns: np.ndarray | None = None
    """float32 [N]: what the critic should have said. None: there is no critic."""

    @property
    def length(self) -> int:
        """Tokens, context included."""
        return len(self.row.token_ids)

    @property
    def token_advantages(self) -> np.ndarray:
        """float32 [N]: advantage of each token with loss."""
        if self.advantages is not None:
            return self.advantages
        return np.full(self.num_loss_tokens, self.advantage, np.float32)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens with loss."""
        return len(self.row.positions)

    def over_age(self, version: int, clock: StalenessConfig) -> bool:
        """True when a token, or a version behind its context, is over its bound at the step from `version` on."""
        return bool(
            np.any(version - self.row.policy_version > clock.max_staleness)
            or np.any(version - self.row.kv_version > clock.kv_bound)
        )


def candidates_of(
    batch: TrainBatch, advantage: Advantage, version: int, replayed: ExpertShape | None
) -> list[Candidate]:
    """All rows of a batch, in batch order, at the trainer's `version`.

    `replayed`: the model whose routes the rows must have. None: routes are not replayed.

    Raises:
        RecordError: a row's trajectory has no reward in its group, or a token comes from a version not yet made.
    """
    candidates: list[Candidate] = []
    for group in batch.groups:
        advantages = group_advantages(advantage, group.rewards)
        for row in group.rows:
            if row.trajectory not in advantages:
                raise RecordError(f"{row.trajectory} has a row but no reward in group {group.group}: keep it out")
            if np.any(row.policy_version > version):
                newest = int(row.policy_version.max())
                raise RecordError(f"{row.trajectory} has tokens of version {newest}, the trainer is at {version}")
            candidates.append(
                Candidate(
                    row=row,
                    advantage=advantages[row.trajectory],
                    truncated=row.trajectory in group.truncated,
                    routable=replayed is None or _has_routes(row, replayed),
                )
            )
    return candidates


def _has_routes(row: Row, shape: ExpertShape) -> bool:
    return row.routes is not None and not shape.fault(row.routes, len(row.token_ids) - 1)
