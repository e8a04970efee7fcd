"""Direct preference optimisation (arXiv 2305.18290). Letters: N tokens with loss, P pairs of the micro-batch.

    s_side = sum over its tokens of log p          (or their mean: `length_normalised`)
    h      = beta * ((s_chosen - ref_chosen) - (s_rejected - ref_rejected))
    loss   = mean over the step's pairs of  -(1 - e) log sigmoid(h) - e log sigmoid(-h)  +  a * -s_chosen / n_chosen

`e` is `label_smoothing`, `a` is `imitation` (the chosen answer's mean loss, arXiv 2404.19733). A pair's sides are
always in one micro-batch; the step's number of pairs is known before the first, so any cut adds up to the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch.nn.functional import logsigmoid

from fathom.config.tuning.preference import PreferenceObjectiveConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSums:
    """Sums over some pairs. Those of the micro-batches add up to those of the step."""

    loss: float = 0.0
    """The number differentiated, the step's mean included."""
    pairs: int = 0
    """Pairs in the gradient."""
    correct: float = 0.0
    """Of these, pairs with h > 0; one with h = 0 is half a pair."""
    margin: float = 0.0
    """Sum of h."""
    chosen_reward: float = 0.0
    """Sum of beta * (s_chosen - ref_chosen)."""
    rejected_reward: float = 0.0
    """The same of the rejected."""
    tokens: int = 0
    """Tokens of both sides of these pairs."""
    non_finite: int = 0
    """Pairs refused for a log-probability that is not finite. They stay in the denominator."""

    def __add__(self, other: PreferenceSums) -> PreferenceSums:
        return PreferenceSums(
            loss=self.loss + other.loss,
            pairs=self.pairs + other.pairs,
            correct=self.correct + other.correct,
            margin=self.margin + other.margin,
            chosen_reward=self.chosen_reward + other.chosen_reward,
            rejected_reward=self.rejected_reward + other.rejected_reward,
            tokens=self.tokens + other.tokens,
            non_finite=self.non_finite + other.non_finite,
        )


def side_sums(logp: torch.Tensor, side: torch.Tensor, sides: int) -> torch.Tensor:
    """float64 [sides]: sums of log-probabilities by side; `side` is int64 [N] in [0, sides)."""
    return torch.zeros(sides, dtype=torch.float64, device=logp.device).index_add(0, side, logp.double())


def preference_loss(
    config: PreferenceObjectiveConfig,
    logp: torch.Tensor,
    side: torch.Tensor,
    reference: torch.Tensor,
    pairs_of_step: int,
) -> tuple[torch.Tensor, PreferenceSums]:
    """A micro-batch's share of the step's loss: a scalar to call `backward` on, and its numbers.

    Args:
        config: the objective.
        logp: [N], with gradient.
        side: int64 [N] in [0, 2P): 2 * pair for tokens of the chosen side, one more for the rejected.
        reference: float64 [P, 2]: `side_sums` under the reference policy.
        pairs_of_step: pairs of the optimizer step.

    A pair with a value that is not finite enters no arithmetic: its tokens' gradient is exactly 0.
    """
    pairs = len(reference)
    bad_sides = torch.zeros(2 * pairs, dtype=torch.bool, device=logp.device)
    bad_sides[side[~torch.isfinite(logp.detach())]] = True
    bad = bad_sides.view(pairs, 2).any(1) | ~torch.isfinite(reference).all(1)
    kept_pairs = (~bad).nonzero().squeeze(1)
    kept = (~bad[side // 2]).nonzero().squeeze(1)

    sums = side_sums(logp[kept], side[kept], 2 * pairs).view(pairs, 2)[kept_pairs]
    counts = torch.bincount(side, minlength=2 * pairs).view(pairs, 2)[kept_pairs].to(torch.float64)
    lengths = counts if config.length_normalised else torch.ones_like(counts)
    rewards = config.beta * (sums - reference[kept_pairs]) / lengths
    margin = rewards[:, 0] - rewards[:, 1]
    smoothing = config.label_smoothing
    per_pair = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    if config.imitation:
        per_pair = per_pair - config.imitation * sums[:, 0] / counts[:, 0]
    loss = per_pair.sum() / max(1, pairs_of_step)
    told = margin.detach()
    return loss, PreferenceSums(
        loss=float(loss.detach()),
        pairs=len(kept_pairs),
        correct=float((told > 0).sum()) + 0.5 * float((told == 0).sum()),
        margin=float(told.sum()),
        chosen_reward=float(rewards[:, 0].detach().sum()),
        rejected_reward=float(rewards[:, 1].detach().sum()),
        tokens=len(kept),
        non_finite=int(bad.sum()),
    )
