"""The critic's loss (`algorithms.md` D.7). Letters: N tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.aggregation import AGGREGATIONS
from fathom.trainer.objective.plan import StepPlan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Loss of each token."""

    loss: torch.Tensor
    """[N], with gradient."""
    clipped: torch.Tensor
    """Bool [N]: the clipped term was larger than the unclipped one."""


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None) -> ValueLoss:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), without a factor 1/2. All arguments [N].

    `clip` None: (V - R)^2.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(loss=free, clipped=torch.zeros_like(free, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(loss=torch.maximum(free, bounded), clipped=bounded.detach() > free.detach())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSums:
    """Sums and counts of some tokens. Those of the micro-batches add up to those of the step."""

    loss: float = 0.0
    """The number differentiated."""
    tokens: int = 0
    """Tokens of it."""
    clipped: int = 0
    """Tokens of these whose clipped term was larger."""
    error: float = 0.0
    """Sum of returns - values."""
    error_squared: float = 0.0
    """Sum of its squares."""
    returns: float = 0.0
    """Sum of returns."""
    returns_squared: float = 0.0
    """Sum of their squares."""
    non_finite: int = 0
    """Tokens refused for a value that is not finite."""

    def __add__(self, other: ValueSums) -> ValueSums:
        return ValueSums(
            loss=self.loss + other.loss,
            tokens=self.tokens + other.tokens,
            clipped=self.clipped + other.clipped,
            error=self.error + other.error,
            error_squared=self.error_squared + other.error_squared,
            returns=self.returns + other.returns,
            returns_squared=self.returns_squared + other.returns_squared,
            non_finite=self.non_finite + other.non_finite,
        )

    @property
    def explained_variance(self) -> float | None:
        """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one that knows the mean alone. None: the
        returns do not vary."""
        if not self.tokens:
            return None
        of_returns = self.returns_squared / self.tokens - (self.returns / self.tokens) ** 2
        of_error = self.error_squared / self.tokens - (self.error / self.tokens) ** 2
        return 1 - of_error / of_returns if of_returns > _SMALLEST_VARIANCE else None


_SMALLEST_VARIANCE = 1e-12


def value_micro_batch_loss(
    config: ObjectiveConfig, plan: StepPlan, values: torch.Tensor
) -> tuple[torch.Tensor, ValueSums]:
    """Contribution of the tokens of `plan` to the critic's loss of the step, and its numbers.

    Over the tokens in the policy's gradient, aggregated in the same way. Gradients of micro-batches are summed.
    `values`, [N]: with gradient. Raises ValueError when the plan has no old values or returns.
    """
    tokens, gate = plan.tokens, plan.gate
    if gate is None or tokens.values is None or tokens.returns is None:
        raise ValueError("a value loss needs logp_old, values and returns of the step")
    finite = gate.in_gradient & values.detach().isfinite()
    kept = finite.nonzero().squeeze(1)
    returns = tokens.returns[kept]
    made = value_loss(values[kept], tokens.values[kept], returns, config.value_clip)
    sequence = tokens.sequence[kept]
    coefficients = AGGREGATIONS[config.aggregation](plan.denominators, sequence, config.constant_length)
    loss = (coefficients.to(made.loss.dtype) * made.loss).sum()
    error, wanted = (returns - values.detach()[kept]).to(torch.float64), returns.to(torch.float64)
    return loss, ValueSums(
        loss=float(loss.detach()),
        tokens=len(kept),
        clipped=int(made.clipped.sum()),
        error=float(error.sum()),
        error_squared=float(error.square().sum()),
        returns=float(wanted.sum()),
        returns_squared=float(wanted.square().sum()),
        non_finite=int((gate.in_gradient & ~finite).sum()),
    )
