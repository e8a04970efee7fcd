"""Policy-gradient losses of single tokens (`algorithms.md` D.2, D.4, D.5, B.4). Letters: N tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import PolicyLossKind, Proximal
from fathom.config.objective import ObjectiveConfig

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
class PolicyTokens:
    """What a policy loss sees: tokens in the gradient alone, all figures finite."""

    logp: torch.Tensor
    """[N], with gradient: log-probability under the policy."""
    logp_proximal: torch.Tensor
    """[N]: what the ratio is centred on."""
    logp_behaviour: torch.Tensor
    """[N]: under the distribution that the token was sampled from."""
    advantage: torch.Tensor
    """[N]."""
    sequence_log_ratio: torch.Tensor | None = None
    """[N]: mean of log policy - log proximal over all tokens in the gradient of the token's trajectory, wherever its
    rows are, under the weights of this step. None: the loss has no use for it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of each token, before weights and aggregation."""

    loss: torch.Tensor
    """[N], with gradient."""
    ratio: torch.Tensor
    """[N], detached: the policy ratio. 1 where the loss has none."""
    clipped: torch.Tensor
    """Bool [N]: the bound of the ratio decides: the clipped term was larger than the unclipped one, the weight is a
    bound, or the token was dropped. The dual clip is not counted."""
    beyond: torch.Tensor
    """Bool [N]: the log ratio left [-20, 20]."""


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
    return PolicyLoss(
        loss=loss,
        ratio=ratio.detach(),
        clipped=clipped.detach() > unclipped.detach(),
        beyond=beyond_limit(log_ratio.detach()),
    )


def clip(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """The clipped loss of each token's own ratio."""
    return clipped_policy_loss(
        tokens.logp - tokens.logp_proximal,
        tokens.advantage,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def sequence_clip(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """The clipped loss of s pi / sg(pi), s the ratio of the trajectory (GSPO in its token form). arXiv 2507.18071.

    All tokens of a trajectory have the value of its sequence loss. Under `seq_mean_token_mean` their sum has the
    sequence loss's gradient, -s A / n at each of n tokens or 0 where clipped, though no token's loss depends on
    another's forward: s comes from a pass over the whole step. Under other means long trajectories would weigh more.
    """
    assert tokens.sequence_log_ratio is not None, "prepare_step computes it for this loss"
    return clipped_policy_loss(
        tokens.sequence_log_ratio + (tokens.logp - tokens.logp.detach()),
        tokens.advantage,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def clipped_weight(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: no token loses its gradient (CISPO). arXiv 2506.13585."""
    log_ratio = tokens.logp.detach() - tokens.logp_proximal
    ratio = bounded_ratio(log_ratio)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return PolicyLoss(
        loss=-weight * tokens.advantage * tokens.logp,
        ratio=ratio,
        clipped=weight != ratio,
        beyond=beyond_limit(log_ratio),
    )


def reinforce(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """-A log pi. arXiv 2402.14740."""
    nowhere = torch.zeros_like(tokens.logp, dtype=torch.bool)
    return PolicyLoss(
        loss=-tokens.advantage * tokens.logp,
        ratio=torch.ones_like(tokens.advantage),
        clipped=nowhere,
        beyond=nowhere,
    )


def _in_region(config: ObjectiveConfig, tokens: PolicyTokens, kept: torch.Tensor) -> PolicyLoss:
    """-kept rho A + ratio_penalty (log rho)^2, rho to the behaviour policy; the penalty is of all tokens."""
    log_ratio = tokens.logp - tokens.logp_behaviour
    ratio = bounded_ratio(log_ratio)
    pushed = torch.where(kept, -ratio * tokens.advantage, torch.zeros_like(ratio))
    penalty = config.ratio_penalty * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()
    return PolicyLoss(
        loss=pushed + penalty, ratio=ratio.detach(), clipped=~kept, beyond=beyond_limit(log_ratio.detach())
    )


def signed_region(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """Dropped: A > 0 and p - q > clip_high, or A <= 0 and p - q < -clip_low (binary DPPO). arXiv 2602.04879."""
    moved = tokens.logp.detach().exp() - tokens.logp_behaviour.exp()
    dropped = torch.where(tokens.advantage > 0, moved > config.clip_high, moved < -config.clip_low)
    return _in_region(config, tokens, ~dropped)


def region(config: ObjectiveConfig, tokens: PolicyTokens) -> PolicyLoss:
    """Dropped: |p - q| > clip_high (IPO)."""
    moved = tokens.logp.detach().exp() - tokens.logp_behaviour.exp()
    return _in_region(config, tokens, moved.abs() <= config.clip_high)


POLICY_LOSSES: dict[PolicyLossKind, Callable[[ObjectiveConfig, PolicyTokens], PolicyLoss]] = {
    PolicyLossKind.CLIP: clip,
    PolicyLossKind.SEQUENCE_CLIP: sequence_clip,
    PolicyLossKind.CLIPPED_WEIGHT: clipped_weight,
    PolicyLossKind.REINFORCE: reinforce,
    PolicyLossKind.SIGNED_REGION: signed_region,
    PolicyLossKind.REGION: region,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalInputs:
    """What the proximal policy is made of."""

    logp_behaviour: torch.Tensor
    """[N]."""
    logp_old: torch.Tensor
    """[N]: the trainer's, before the first step on the batch."""
    logp_now: torch.Tensor
    """[N], detached: the trainer's, before this step."""
    blend: torch.Tensor | None
    """[N]: how far the proximal policy is from the behaviour policy on the way to the current one. None: not known."""


def decoupled(inputs: ProximalInputs) -> torch.Tensor:
    """Clip around the trainer's policy before the first step on the batch; the correction's weight does the rest."""
    return inputs.logp_old


def bypass(inputs: ProximalInputs) -> torch.Tensor:
    """Clip around the behaviour policy; the ratio holds the whole mismatch, so no weight may be added."""
    return inputs.logp_behaviour


def loglinear(inputs: ProximalInputs) -> torch.Tensor:
    """log behaviour + blend (log now - log behaviour): no pass for old log-probabilities. arXiv 2512.06547."""
    assert inputs.blend is not None, "prepare_step requires it for this proximal policy"
    return inputs.logp_behaviour + inputs.blend * (inputs.logp_now - inputs.logp_behaviour)


PROXIMALS: dict[Proximal, Callable[[ProximalInputs], torch.Tensor]] = {
    Proximal.DECOUPLED: decoupled,
    Proximal.BYPASS: bypass,
    Proximal.LOGLINEAR: loglinear,
}
"""Each gives [N], the denominator of the policy ratio."""


def loglinear_blend(policy_version: torch.Tensor, version: int) -> torch.Tensor:
    """float64 [N]: clip((v - 1 - v_behaviour) / (v - v_behaviour), 0, 1), and 0 for tokens of version v itself.

    The proximal policy is then the one a version before the current one, `version`, by interpolation over the
    versions since the token was sampled. `policy_version`: int [N]; negative for a token that no policy sampled, whose
    blend is 0.
    """
    age = (version - policy_version).to(torch.float64)
    blend = ((age - 1) / age.clamp(min=1)).clamp(0, 1)
    return torch.where((age > 0) & (policy_version >= 0), blend, torch.zeros_like(age))
