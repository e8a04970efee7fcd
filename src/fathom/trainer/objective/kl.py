"""Estimators of KL(policy || reference) on single sampled tokens (`algorithms.md` C.2, D.8). Letters: N tokens.

All take x = log policy - log reference at a token sampled from the policy. Their values and the gradients of
their values are different matters: differentiated as a loss, in expectation over tokens from the policy,

    k1 = x                 gives 0,
    k2 = x^2 / 2           gives the gradient of KL(policy || reference),
    k3 = e^-x - 1 + x      gives the gradient of KL(reference || policy),

while k1 and k3 have the value of KL(policy || reference), and k2 has it up to second order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fathom.config.families import KlEstimator
from fathom.trainer.objective.policy_loss import LOG_RATIO_LIMIT


def k1(x: torch.Tensor) -> torch.Tensor:
    """Value x; gradient 1."""
    return x


def k2(x: torch.Tensor) -> torch.Tensor:
    """Value x^2 / 2; gradient x."""
    return x.square() / 2


def k3(x: torch.Tensor) -> torch.Tensor:
    """Value e^-x - 1 + x; gradient 1 - e^-x, and 0 below x = -20, where x is clamped so that e^-x stays finite."""
    bounded = x.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-bounded) + bounded


KL_ESTIMATORS: dict[KlEstimator, Callable[[torch.Tensor], torch.Tensor]] = {
    KlEstimator.K1: k1,
    KlEstimator.K2: k2,
    KlEstimator.K3: k3,
}


def kl_loss(
    estimator: KlEstimator,
    logp: torch.Tensor,
    logp_ref: torch.Tensor,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate at each token, [N], with the gradients above.

    `importance` multiplies it for tokens that another distribution sampled. Detached, it is a weight and restores the
    expectations above; with its gradient (policy / behaviour), k1 and k3 get the gradient of KL(policy || reference).
    """
    estimate = KL_ESTIMATORS[estimator](logp - logp_ref)
    return estimate if importance is None else importance * estimate
