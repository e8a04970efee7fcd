"""What a forward tells an objective. Letters: N tokens with loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Of the tokens with loss of one forward, in their order, on the CPU, with gradient where one is taken."""

    logprobs: Tensor
    """[N]: log-probability of each token under its sampling distribution."""
    ids: Tensor | None = None
    """[K]: log-probabilities of the ids compared with a teacher (`PackedRows.compared`), under the same distributions.
    None: there are none."""
    entropy: Tensor | None = None
    """[N]: -sum p log p of the distribution each token was drawn from, over the whole vocabulary (the kept set where
    one was recorded), at its temperature and with its biases; `algorithms.md` D.8. None: not asked for."""
