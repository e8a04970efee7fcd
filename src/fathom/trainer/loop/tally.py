"""What the micro-batches of a step report, put back in the order of its tokens. Letters: N tokens with loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from torch import Tensor

from fathom.core.records.step import MaskReason
from fathom.model.routing import Routing
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.loop.candidate import Candidate
from fathom.trainer.loop.routes import RouteTally
from fathom.trainer.objective.credit.value_loss import ValueSums
from fathom.trainer.objective.objective import LossSums
from fathom.trainer.objective.plan import MASK_CODES, Gate

OVER_AGE = MASK_CODES[MaskReason.AGE]
"""Mask code of tokens whose row was removed for age."""
NO_ROUTES = MASK_CODES[MaskReason.ROUTES]
"""Mask code of tokens whose row was removed for want of complete routes."""
NO_TEACHER = MASK_CODES[MaskReason.NO_TEACHER]
"""Mask code of tokens whose row was removed for want of a teacher's scores."""


@final
class Tally:
    """All tokens of a step, row after row.

    A token nobody reports on stays masked, for want of routes or for age: its row was not trained.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.places = row_places(candidates)
        """Where each row's tokens are."""
        tokens = sum(candidate.num_loss_tokens for candidate in candidates)
        self.trainer_logprobs = np.full(tokens, np.nan, np.float32)
        """float32 [N]: trainer's log-probabilities before the first step on the batch. NaN: unknown."""
        self.weights = np.zeros(tokens, np.float32)
        """float32 [N]: correction weights."""
        self.mask_codes = np.full(tokens, OVER_AGE, np.int8)
        """int8 [N]: -1 in the gradient, else the code of the reason."""
        self.capped = np.zeros(tokens, np.bool_)
        """bool [N]: the weight is a bound instead of the ratio."""
        self.rejected = np.zeros(tokens, np.bool_)
        """bool [N]: the correction set the weight to 0."""
        self.reference_logprobs: np.ndarray | None = None
        """float32 [N]: the reference's log-probabilities, NaN where none were taken. None: there is no reference."""
        self.route_changes = np.full(tokens, -1, np.int16)
        """int16 [N]: layers in which the trainer chose other experts than recorded. -1: not compared."""
        self.routes = RouteTally()
        """Comparison of routes."""
        self.sums = LossSums()
        """Sums over the tokens reported."""
        self.value_sums = ValueSums()
        """The critic's sums over the tokens reported."""
        for candidate, place in zip(candidates, self.places, strict=True):
            if candidate.old_logprobs is not None:
                self.trainer_logprobs[place] = candidate.old_logprobs
            if not candidate.routable:
                self.mask_codes[place] = NO_ROUTES
            elif not candidate.taught:
                self.mask_codes[place] = NO_TEACHER

    @property
    def untrained(self) -> np.ndarray:
        """bool [N]: tokens of rows that were removed before any forward."""
        return np.isin(self.mask_codes, (OVER_AGE, NO_ROUTES, NO_TEACHER))

    def add(self, index: np.ndarray, trainer_logprobs: Tensor, gate: Gate, sums: LossSums) -> None:
        """Report on the tokens at `index`, int64 [n]."""
        self.trainer_logprobs[index] = trainer_logprobs.numpy()
        self.weights[index] = gate.weights.numpy()
        self.mask_codes[index] = gate.mask_codes.numpy()
        self.capped[index] = gate.capped.numpy()
        self.rejected[index] = gate.rejected.numpy()
        self.sums = self.sums + sums

    def add_reference(self, indices: Sequence[int], logprobs: Tensor) -> None:
        """Report what the reference says of the rows `indices`, float32 [n], row after row."""
        if self.reference_logprobs is None:
            self.reference_logprobs = np.full(len(self.mask_codes), np.nan, np.float32)
        self.reference_logprobs[np.r_[tuple(self.places[i] for i in indices)]] = logprobs.numpy()

    def add_values(self, sums: ValueSums) -> None:
        """Report what the critic made of some tokens."""
        self.value_sums = self.value_sums + sums

    def add_routes(self, index: np.ndarray, packed: PackedRows, routing: Routing) -> None:
        """Report what the routers chose for the rows whose tokens are at `index`, int64 [n]."""
        self.route_changes[index] = self.routes.add(packed, routing)[packed.sources]


def row_places(candidates: Sequence[Candidate]) -> list[slice]:
    """Where each row's tokens with loss are when the rows lie end to end."""
    ends = np.cumsum([candidate.num_loss_tokens for candidate in candidates]).tolist()
    return [slice(end - c.num_loss_tokens, end) for c, end in zip(candidates, ends, strict=True)]
