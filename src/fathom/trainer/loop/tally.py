"""What the micro-batches of a step report, put back in the order of its tokens. Letters: N tokens with loss."""

from __future__ import annotations

from typing import final

import numpy as np
from torch import Tensor

from fathom.trainer.objective.objective import LossSums
from fathom.trainer.objective.plan import Gate


@final
class Tally:
    """Filled micro-batch by micro-batch; whole when every token was reported once."""

    def __init__(self, tokens: int) -> None:
        self.trainer_logprobs = np.full(tokens, np.nan, np.float32)
        """float32 [N]: trainer's log-probabilities before the first step on the batch."""
        self.weights = np.zeros(tokens, np.float32)
        """float32 [N]: correction weights."""
        self.mask_codes = np.zeros(tokens, np.int8)
        """int8 [N]: -1 in the gradient, else the code of the reason."""
        self.capped = np.zeros(tokens, np.bool_)
        """bool [N]: the weight is a bound instead of the ratio."""
        self.rejected = np.zeros(tokens, np.bool_)
        """bool [N]: the correction set the weight to 0."""
        self.sums = LossSums()
        """Sums over the tokens reported."""

    def add(self, index: np.ndarray, trainer_logprobs: Tensor, gate: Gate, sums: LossSums) -> None:
        """Report the tokens at `index`, int64 [n]."""
        self.trainer_logprobs[index] = trainer_logprobs.numpy()
        self.weights[index] = gate.weights.numpy()
        self.mask_codes[index] = gate.mask_codes.numpy()
        self.capped[index] = gate.capped.numpy()
        self.rejected[index] = gate.rejected.numpy()
        self.sums = self.sums + sums
