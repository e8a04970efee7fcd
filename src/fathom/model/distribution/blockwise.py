"""Softmax by blocks: one pass over the logits gives the normaliser, and a distribution that is quick to draw from.

Every number of a row depends on that row alone, to the bit: not on the other rows, their order or their number. The
sums are as exact as pairwise ones, which those of a softmax over a whole vocabulary are not.

Letters: R rows, W values of a row, B blocks of a row, C values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Values of a block. Vocabularies that are a multiple of it are not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockwise:
    """The softmax of R rows: `exp(masses - normaliser)` is the share of each block, `within` that of its values."""

    within: Tensor
    """float32 [R, B, C]: softmax of each block by itself. Values beyond W have probability 0."""
    block_tops: Tensor
    """float32 [R, B]: largest value of each block."""
    tops: Tensor
    """float32 [R]: largest value of each row; what follows is relative to it, which keeps its digits."""
    masses: Tensor
    """float32 [R, B]: log of the mass of each block, relative to `tops`."""
    normaliser: Tensor
    """float32 [R]: log of the mass of the row, relative to `tops`; at least 0."""

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Of float32 [R, W] values, of which -inf means absent; every block needs one that is not."""
        blocks = in_blocks(values)
        within = torch.softmax(blocks, dim=2)
        block_tops = blocks.amax(dim=2)
        tops = block_tops.amax(dim=1)
        # The largest probability of a block is 1 over its sum: the softmax has done the exponentials already.
        masses = (block_tops - tops.unsqueeze(1)) - within.amax(dim=2).log()
        normaliser = torch.logsumexp(masses, dim=1)
        return cls(within=within, block_tops=block_tops, tops=tops, masses=masses, normaliser=normaliser)

    def logprobs(self, values: Tensor, places: Tensor) -> Tensor:
        """float32 [R]: log-probability of the value at int64 [R] `places`, at most 0."""
        chosen = values.gather(1, places.unsqueeze(1)).squeeze(1)
        return ((chosen - self.tops) - self.normaliser).clamp(max=0.0)

    def invert(self, uniforms: np.ndarray) -> np.ndarray:
        """int64 [R]: the first place at which the cumulative distribution passes float64 [R] `uniforms` in [0, 1).

        Sums are in float64: of the blocks, then of the values of the block that is met. Such a place always has a
        positive probability. A row with values that are not finite gives some place.
        """
        shares = np.exp((self.masses - self.masses.amax(dim=1, keepdim=True)).double().cpu().numpy())
        blocks, left = _pass(np.cumsum(shares, axis=1), uniforms, shares)
        rows = torch.arange(len(blocks), device=self.within.device)
        within = self.within[rows, torch.from_numpy(blocks).to(rows.device)].double().cpu().numpy()
        inside, _ = _pass(np.cumsum(within, axis=1), left, within)
        return blocks * self.within.shape[2] + inside


def in_blocks(values: Tensor) -> Tensor:
    """float32 [R, B, C]: the values cut into blocks, the last one filled up with -inf."""
    rows, width = values.shape
    size = min(BLOCK, width)
    if short := -width % size:
        values = pad(values, (0, short), value=-torch.inf)
    return values.view(rows, -1, size)


def chosen_logprobs(values: Tensor, places: Tensor) -> Tensor:
    """float32 [R]: log softmax of float32 [R, W] `values` at int64 [R] `places`. Differentiable."""
    return cast("Tensor", _ChosenLogprobs.apply(values, places))


def entropies(values: Tensor) -> Tensor:
    """float32 [R]: -sum p log p of the softmax of float32 [R, W] `values`; -inf means absent. Differentiable."""
    return cast("Tensor", _Entropies.apply(values))


class _Entropies(torch.autograd.Function):
    """dH/dvalue = -p (log p + H). A value that is absent, or whose probability rounds to 0, has no part in it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        blockwise = Blockwise.of(values)
        logprobs = (values - blockwise.tops.unsqueeze(1)) - blockwise.normaliser.unsqueeze(1)
        shares = logprobs.exp()
        logprobs = logprobs.masked_fill(shares == 0, 0.0)
        found = -(shares * logprobs).sum(dim=1).clamp(max=0.0)
        ctx.save_for_backward(shares, logprobs, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        shares, logprobs, found = ctx.saved_tensors
        return -gradient.unsqueeze(1) * shares * (logprobs + found.unsqueeze(1))


class _ChosenLogprobs(torch.autograd.Function):
    """The backward reuses the probabilities of the forward: no exponential of a vocabulary is taken twice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        blockwise = Blockwise.of(values)
        shares = (blockwise.masses - blockwise.normaliser.unsqueeze(1)).exp()
        ctx.save_for_backward(blockwise.within, shares, places)
        ctx.width = values.shape[1]
        return blockwise.logprobs(values, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        within, shares, places = ctx.saved_tensors
        by_block = within * (shares * -gradient.unsqueeze(1)).unsqueeze(2)
        of_values = by_block.flatten(1)[:, : ctx.width]
        return of_values.scatter_add(1, places.unsqueeze(1), gradient.unsqueeze(1)), None


def _pass(cumulative: np.ndarray, uniforms: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of float64 [R, B] cumulative sums: int64 [R] the first that is more than its share, and what share of its own
    weight is left, in [0, 1)."""
    total = cumulative[:, -1]
    target = np.minimum(uniforms * total, np.nextafter(total, 0.0))
    first = np.argmax(cumulative > target[:, None], axis=1)
    rows = np.arange(len(first))
    weight = weights[rows, first]
    with np.errstate(divide="ignore", invalid="ignore"):  # of rows that are not finite
        left = (target - (cumulative[rows, first] - weight)) / weight
    return first, np.clip(left, 0.0, 1.0 - 2.0**-53)
