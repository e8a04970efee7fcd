"""What a backend asks of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Optimizer(Protocol):
    """Moves float32 masters by their gradients, which must stay allocated. Its state is plain tensors by name."""

    def step(self, lr: float) -> None:
        """Move the masters by their gradients at this learning rate."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, as `slot/master`. Empty before the first step."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Become what `state` returned. Raises CheckpointError when it is not of these masters and this kind."""
        ...
