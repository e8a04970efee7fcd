"""Imitation: the negative log-likelihood of shown tokens (`algorithms.md` D.8). Letters: N tokens with loss.

    loss = sum over tokens of c_t * -log p_t          c_t: D.9, over the whole optimizer step

The coefficients are known before the first micro-batch, so any cut and any order adds up to the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import Aggregation
from fathom.trainer.objective.aggregation import AGGREGATIONS, count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationSums:
    """Sums of some tokens. Those of the micro-batches add up to those of the step."""

    loss: float = 0.0
    """The number differentiated."""
    nll: float = 0.0
    """Sum of -log p over the tokens in the gradient."""
    tokens: int = 0
    """Tokens in the gradient."""
    non_finite: int = 0
    """Tokens refused for a log-probability that is not finite. They stay in the denominators."""

    def __add__(self, other: ImitationSums) -> ImitationSums:
        return ImitationSums(
            loss=self.loss + other.loss,
            nll=self.nll + other.nll,
            tokens=self.tokens + other.tokens,
            non_finite=self.non_finite + other.non_finite,
        )


def coefficients(
    aggregation: Aggregation, sequence: torch.Tensor, sequences: int, length: int | None = None
) -> torch.Tensor:
    """float64 [N]: what each token's loss is multiplied by.

    Args:
        aggregation: `token_mean` is 1 / N over the step, what instruction data want.
        sequence: int64 [N], each token's conversation, in [0, sequences).
        sequences: conversations of the step.
        length: the constant of `seq_mean_token_sum_norm`.
    """
    denominators = count(sequence, torch.ones(len(sequence), dtype=torch.bool, device=sequence.device), sequences)
    return AGGREGATIONS[aggregation](denominators, sequence, length)


def imitation_loss(coefficients: torch.Tensor, logp: torch.Tensor) -> tuple[torch.Tensor, ImitationSums]:
    """A micro-batch's share of the step's loss: a scalar to call `backward` on, and its numbers.

    Args:
        coefficients: float64 [n], of its tokens.
        logp: [n], with gradient. Tokens whose value is not finite enter no arithmetic: their gradient is exactly 0.
    """
    kept = torch.isfinite(logp.detach()).nonzero().squeeze(1)
    nll = -logp[kept]
    loss = (coefficients[kept].to(nll.dtype) * nll).sum()
    sums = ImitationSums(
        loss=float(loss.detach()),
        nll=float(nll.detach().double().sum()),
        tokens=len(kept),
        non_finite=len(logp) - len(kept),
    )
    return loss, sums
