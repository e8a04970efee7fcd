"""The clipped policy-gradient loss of single tokens (`algorithms.md` D.2, B.4). Letters: N tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import Proximal

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to [-20, 20] before exp; e^20 = 4.85e8. Beyond, the gradient is 0."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Ratio of two probabilities from the difference of their logarithms, finite whatever that is."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def beyond_limit(log_ratio: torch.Tensor) -> torch.Tensor:
    """Bool [N]: tokens that `bounded_ratio` clamps."""
    return log_ratio.abs() > LOG_RATIO_LIMIT


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of each token, before weights and aggregation."""

    loss: torch.Tensor
    """[N], with gradient."""
    ratio: torch.Tensor
    """[N], detached: the policy ratio."""
    clipped: torch.Tensor
    """Bool [N]: the clipped term was larger than the unclipped one. The dual clip is not counted."""


def clipped_policy_loss(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(log_ratio).

    With `dual_clip` = c, the loss of tokens with A < 0 is at most -c A, beyond which they have no gradient.
    arXiv 1707.06347, 2503.14476 (clip-higher), 1912.09729 (dual clip).
    """
    ratio = bounded_ratio(log_ratio)
    unclipped = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.detach() > unclipped.detach())


def _decoupled(logp_old: torch.Tensor, logp_behaviour: torch.Tensor) -> torch.Tensor:
    """Clip around the trainer's policy before the first step on the batch; the correction's weight does the rest."""
    return logp_old


def _bypass(logp_old: torch.Tensor, logp_behaviour: torch.Tensor) -> torch.Tensor:
    """Clip around the behaviour policy; the ratio holds the whole mismatch, so no weight may be added."""
    return logp_behaviour


PROXIMALS: dict[Proximal, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Proximal.DECOUPLED: _decoupled,
    Proximal.BYPASS: _bypass,
}
"""Each picks, from (logp_old, logp_behaviour), the denominator of the policy ratio."""
