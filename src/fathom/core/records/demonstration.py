"""Supervised data. Its own record: it never enters the buffer or the staleness books."""

from __future__ import annotations

import msgspec
import numpy as np

from fathom.core.errors import RecordError


class Demonstration(msgspec.Struct, frozen=True, tag="demonstration.1"):
    """One sequence to imitate. T tokens."""

    token_ids: np.ndarray
    """int32 [T]: the whole sequence."""
    loss_mask: np.ndarray
    """bool [T]: tokens to imitate; the first token has no left context and is never one of them."""
    source: str
    """Where it came from."""

    def __post_init__(self) -> None:
        if self.token_ids.dtype != np.int32 or self.loss_mask.dtype != np.bool_:
            raise RecordError(f"demonstration from {self.source}: wrong dtypes")
        if self.token_ids.shape != self.loss_mask.shape or not self.loss_mask.any() or self.loss_mask[0]:
            raise RecordError(f"demonstration from {self.source}: loss mask does not fit the tokens")
