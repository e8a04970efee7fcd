"""Returns and advantages of single tokens (`algorithms.md` D.6, D.7). Letters: N tokens, B trajectories.

Only valid tokens are transitions: what lies between them, a tool's answer, a masked or a refused token, is not a step
of its own. All sums are in float64, and nothing depends on the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch

WHITENING_EPSILON = 1e-8
"""Added to the variance under the root."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The valid tokens of each trajectory, one after the other."""

    tokens: torch.Tensor
    """Int64 [M]: indices of the valid tokens among N, by trajectory, then by place."""
    chain: torch.Tensor
    """Int64 [M]: the trajectory of each."""
    step: torch.Tensor
    """Int64 [M]: its place among the valid tokens of the trajectory, from 0."""
    lengths: torch.Tensor
    """Int64 [B]: valid tokens of each trajectory."""

    @classmethod
    def of(cls, sequence: torch.Tensor, place: torch.Tensor, valid: torch.Tensor, sequences: int) -> Self:
        """Lay out tokens: `sequence`, int64 [N], the trajectory; `place`, int64 [N], any number that orders a
        trajectory's tokens; `valid`, bool [N]."""
        tokens = valid.nonzero().squeeze(1)
        tokens = tokens[torch.argsort(place[tokens], stable=True)]
        tokens = tokens[torch.argsort(sequence[tokens], stable=True)]
        chain = sequence[tokens]
        lengths = torch.bincount(chain, minlength=sequences)
        starts = torch.cumsum(lengths, 0) - lengths
        return cls(tokens=tokens, chain=chain, step=torch.arange(len(tokens)) - starts[chain], lengths=lengths)

    @property
    def last(self) -> torch.Tensor:
        """Bool [M]: the token is the last one of its trajectory."""
        return self.step == self.lengths[self.chain] - 1

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [B, L]: the values, [N], of the valid tokens step by step; 0 beyond the last one."""
        width = int(self.lengths.max()) if len(self.lengths) else 0
        grid = torch.zeros(len(self.lengths), width, dtype=torch.float64)
        return grid.index_put((self.chain, self.step), values[self.tokens].to(torch.float64))

    def scatter(self, grid: torch.Tensor, total: int) -> torch.Tensor:
        """float64 [N]: back from the grid; 0 for tokens that are not valid."""
        flat = torch.zeros(total, dtype=torch.float64)
        return flat.index_put((self.tokens,), grid[self.chain, self.step])


def token_rewards(chains: Chains, rewards: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """float64 [N]: -penalty at every valid token, and the trajectory's reward at the last one of them.

    Args:
        chains: the valid tokens.
        rewards: [B], one for each trajectory.
        penalties: [N], the KL penalty with its coefficient.
    """
    found = torch.zeros(len(penalties), dtype=torch.float64)
    found[chains.tokens] = -penalties[chains.tokens].to(torch.float64)
    last = chains.last
    found[chains.tokens[last]] += rewards.to(torch.float64)[chains.chain[last]]
    return found


def discounted_returns(chains: Chains, rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """float64 [N]: G_j = r_j + gamma G_(j+1) over the valid tokens; 0 elsewhere. `rewards`: [N]."""
    return _backwards(chains, chains.grid(rewards), gamma, len(rewards))


def generalised_advantages(
    chains: Chains, rewards: torch.Tensor, values: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, float64 [N] each; 0 where a token is not valid. arXiv 1506.02438.

    A_j = delta_j + gamma lambda A_(j+1), delta_j = r_j + gamma V_(j+1) - V_j, returns A + V. The value after the last
    valid token is 0, that of a truncated trajectory too. `rewards`, `values`: [N].
    """
    V = chains.grid(values)  # noqa: N806  as in the formula
    following = torch.cat((V[:, 1:], torch.zeros(len(V), min(1, V.shape[1]), dtype=torch.float64)), dim=1)
    deltas = chains.grid(rewards) + gamma * following - V
    advantages = _backwards(chains, deltas, gamma * gae_lambda, len(rewards))
    return advantages, advantages + chains.scatter(V, len(rewards))


def _backwards(chains: Chains, grid: torch.Tensor, decay: float, total: int) -> torch.Tensor:
    """x_j + decay * (the same from j + 1 on). Beyond the last step the grid is 0, so nothing flows in."""
    summed = torch.zeros_like(grid)
    running = torch.zeros(len(grid), dtype=torch.float64)
    for step in reversed(range(grid.shape[1])):
        running = grid[:, step] + decay * running
        summed[:, step] = running
    return chains.scatter(summed, total)


def whitened(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """float64 [N]: (x - mean) / sqrt(var + 1e-8) over the valid tokens; 0 elsewhere.

    Mean first, then the squares around it, var with M - 1 in its denominator: no cancellation. One valid token, or
    equal values, give exactly 0.
    """
    found = torch.zeros(len(values), dtype=torch.float64)
    chosen = values[valid].to(torch.float64)
    if len(chosen) > 1 and bool((chosen != chosen[0]).any()):
        centred = chosen - chosen.mean()
        variance = centred.square().sum() / (len(chosen) - 1)
        found[valid] = centred / (variance + WHITENING_EPSILON).sqrt()
    return found
