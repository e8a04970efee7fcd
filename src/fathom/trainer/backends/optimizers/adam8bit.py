"""AdamW with moments of 8 bits (`bitsandbytes`, imported here alone)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from fathom.config.trainer import OptimizerConfig
from fathom.core.errors import MissingDependencyError
from fathom.trainer.backends.optimizers.slots import decayed, read_slots, refuse_other_state, set_rate, write_slots

_SMALLEST = 4096
"""Elements: the library keeps both moments of smaller masters in float32."""


@final
class Adam8bit:
    """See `port.Optimizer`. Both moments are dynamic 8-bit codes in blocks of 256 with a scale each. arXiv 2110.02861.

    Masters of less than 4096 elements keep float32 moments.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        """Raises MissingDependencyError when the library is not installed."""
        self._masters = masters
        self._optimizer: torch.optim.Optimizer = _library().optim.AdamW8bit(
            decayed(masters, config.weight_decay),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            min_8bit_size=_SMALLEST,
        )

    def step(self, lr: float) -> None:
        """See `port.Optimizer`."""
        set_rate(self._optimizer, lr)
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """See `port.Optimizer`: moments (uint8 or float32, the master's shape), scales, code books and counts."""
        return read_slots(self._optimizer, self._masters, _slots)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See `port.Optimizer`."""
        refuse_other_state(state, self._masters, _slots)
        write_slots(self._optimizer, self._masters, _slots, state, shaped=("state1", "state2"))


def _slots(master: Tensor) -> tuple[str, ...]:
    moments = ("state1", "state2", "step")
    return moments if master.numel() < _SMALLEST else (*moments, "qmap1", "qmap2", "absmax1", "absmax2")


def _library() -> Any:
    # It says so when a kernel for inference is missing, which has nothing to do with an optimizer.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError:
        raise MissingDependencyError("optimizer.kind = 'adam8bit'", "bitsandbytes", "adam8bit") from None
    return bitsandbytes
