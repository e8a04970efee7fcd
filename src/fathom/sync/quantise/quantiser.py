"""The port of a quantiser: what stands between the trainer's cast and what is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fathom.core.manifest import TensorFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A version as it goes out."""

    tensors: Mapping[str, Tensor]
    """Every tensor under the name it had, coded or as it was, and beside them the scales."""
    formats: Mapping[str, TensorFormat]
    """How those that are coded are, by name."""


class Quantiser(Protocol):
    """Codes a version. The same tensors give the same bits, whenever and wherever it is done."""

    def apply(self, tensors: Mapping[str, Tensor]) -> Quantised:
        """Code `tensors` (the served cast), which do not change; the result shares no memory with what it coded.

        Raises:
            PayloadError: a tensor cannot be coded. Names it.
        """
        ...
