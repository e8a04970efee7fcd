"""The batch that the trainer has: what its steps did with each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.buffer.group import FinishedGroup, loss_tokens
from fathom.core.errors import BooksError
from fathom.core.ids import TrajectoryId
from fathom.core.records.step import MaskReason, RowOutcome, StepOutcome
from fathom.core.records.trajectory import Trajectory

_REASONS = tuple(MaskReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Where each sampled token of a trajectory went."""

    trained: bool
    """True when a step on its rows changed the weights."""
    in_gradient: int
    """Tokens in the gradient."""
    masked: Counter[MaskReason]
    """The others, by reason."""


@final
class BatchInTraining:
    """Collects the outcomes of the steps on one batch. Every row must come back exactly once."""

    def __init__(self, groups: Sequence[FinishedGroup]) -> None:
        self.groups = tuple(groups)
        self._missing = {
            (row.trajectory, row.branch): (len(row.positions), deadline)
            for group in groups
            for row, deadline in zip(group.rows, group.row_deadlines, strict=True)
        }
        self._trained: set[TrajectoryId] = set()
        self._in_gradient: Counter[TrajectoryId] = Counter()
        self._masked: dict[TrajectoryId, Counter[MaskReason]] = {}

    def add(self, outcome: StepOutcome, version: int) -> None:
        """Note a step that was taken from `version`.

        Raises:
            BooksError: a row is foreign, came twice, has a wrong length, or was over its bound at this step.
        """
        for row in outcome.rows:
            expected = self._missing.pop((row.trajectory, row.branch), None)
            if expected is None:
                raise BooksError(f"step {outcome.number} reports a row of {row.trajectory} twice, or one it never got")
            num_tokens, deadline = expected
            if len(row.mask_codes) != num_tokens:
                raise BooksError(
                    f"step {outcome.number} reports {len(row.mask_codes)} tokens of {row.trajectory}, not {num_tokens}"
                )
            if version > deadline:
                raise BooksError(f"step {outcome.number} trained a row of {row.trajectory} that is over its age bound")
            self._note(row, outcome.stepped)

    def account(self, trajectory: Trajectory) -> TokenAccount:
        """All sampled tokens of a member that had rows, once every step is noted."""
        name = trajectory.header.id
        in_gradient, masked = self._in_gradient[name], Counter(self._masked.get(name, {}))
        with_loss = loss_tokens(trajectory)
        masked[MaskReason.AGE] += with_loss - in_gradient - masked.total()
        masked[MaskReason.NO_LOSS] += trajectory.payload.num_sampled - with_loss
        return TokenAccount(trained=name in self._trained, in_gradient=in_gradient, masked=+masked)

    def require_complete(self) -> None:
        """Raise BooksError unless every row came back."""
        if self._missing:
            missing = sorted({trajectory for trajectory, _ in self._missing})
            raise BooksError(f"the trainer never reported rows of {', '.join(missing)}")

    def _note(self, row: RowOutcome, stepped: bool) -> None:
        kept, *masked_counts = np.bincount(row.mask_codes + 1, minlength=len(_REASONS) + 1).tolist()
        masked = self._masked.setdefault(row.trajectory, Counter())
        masked.update(dict(zip(_REASONS, masked_counts, strict=True)))
        if stepped:
            self._trained.add(row.trajectory)
            self._in_gradient[row.trajectory] += kept
        else:
            masked[MaskReason.NOT_TRAINED] += kept
