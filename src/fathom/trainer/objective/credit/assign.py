"""Advantages of a batch's tokens, before its first optimizer step. Letters: N tokens with loss, B trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import AdvantageSource, KlPlacement
from fathom.config.objective import ObjectiveConfig
from fathom.core.ids import TrajectoryId
from fathom.core.records.step import GroupBatch
from fathom.trainer.objective.advantages import group_advantages
from fathom.trainer.objective.credit.returns import (
    Chains,
    discounted_returns,
    generalised_advantages,
    token_rewards,
    whitened,
)
from fathom.trainer.objective.kl import KL_ESTIMATORS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """The tokens with loss of a batch, in any order of its rows. A figure that is not finite makes a token invalid."""

    sequence: torch.Tensor
    """Int64 [N]: index of the token's trajectory in `trajectories`."""
    trajectories: tuple[TrajectoryId, ...]
    """B trajectories."""
    place: torch.Tensor
    """Int64 [N]: ascending along a trajectory, through all its rows."""
    truncated: torch.Tensor
    """Bool [N]: its trajectory ended as truncated; not valid if such tokens are masked."""
    logp_behaviour: torch.Tensor
    """[N]."""
    logp_old: torch.Tensor | None = None
    """[N]: trainer's log-probability before the first step. None: no pass was made."""
    logp_ref: torch.Tensor | None = None
    """[N]: reference's. None: the reward has no KL penalty."""
    values: torch.Tensor | None = None
    """[N]: the critic's values. None: there is no critic."""

    def valid(self, config: ObjectiveConfig) -> torch.Tensor:
        """Bool [N]: not masked for truncation, and every figure is finite."""
        found = self.logp_behaviour.isfinite()
        if config.mask_truncated:
            found = found & ~self.truncated
        for column in (self.logp_old, self.logp_ref, self.values):
            if column is not None:
                found = found & column.isfinite()
        return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each token of a batch is worth. A token that is not valid has 0."""

    advantages: torch.Tensor
    """float64 [N]."""
    returns: torch.Tensor | None
    """float64 [N]: what the critic should say. None: there is no critic."""


def by_token(config: ObjectiveConfig) -> bool:
    """Whether advantages depend on more than the rewards of a group: on tokens, a reference, a critic, the batch."""
    in_reward = config.reference and config.kl_placement is KlPlacement.REWARD
    return config.declaration.advantages is not AdvantageSource.GROUP or config.whiten or in_reward


def assign_credit(config: ObjectiveConfig, groups: Sequence[GroupBatch], tokens: BatchTokens) -> Credit:
    """Advantages by the objective's source, then whitened over all valid tokens if it says so.

    A KL penalty in the reward is that of each token where tokens have rewards of their own (returns, critic), and the
    sum over a trajectory's valid tokens, taken off its reward before the baseline, where a group is compared.

    Raises:
        ValueError: the critic's values are missing.
    """
    valid, penalties = tokens.valid(config), _penalties(config, tokens)
    chains = Chains.of(tokens.sequence, tokens.place, valid, len(tokens.trajectories))
    returns: torch.Tensor | None = None
    if config.declaration.advantages is AdvantageSource.GROUP:
        advantages = _group_advantages(config, groups, tokens, chains, penalties)
    else:
        rewards = token_rewards(chains, _rewards(groups, tokens.trajectories), penalties)
        if config.declaration.advantages is AdvantageSource.RETURNS:
            advantages = discounted_returns(chains, rewards, config.gamma)
        else:
            if tokens.values is None:
                raise ValueError(f"objective.kind = '{config.kind}' needs values: score the rows with the critic")
            advantages, returns = generalised_advantages(
                chains, rewards, tokens.values, config.gamma, config.gae_lambda
            )
    return Credit(advantages=whitened(advantages, valid) if config.whiten else advantages, returns=returns)


def _penalties(config: ObjectiveConfig, tokens: BatchTokens) -> torch.Tensor:
    """float64 [N]: what the reward loses at each valid token; 0 elsewhere."""
    penalties = torch.zeros(len(tokens.sequence), dtype=torch.float64)
    if not config.reference or config.kl_placement is not KlPlacement.REWARD:
        return penalties
    if tokens.logp_old is None or tokens.logp_ref is None:
        raise ValueError("objective.kl_placement = 'reward' needs logp_old and logp_ref: score the rows with both")
    valid = tokens.valid(config)
    x = tokens.logp_old[valid].to(torch.float64) - tokens.logp_ref[valid].to(torch.float64)
    penalties[valid] = config.kl_coefficient * KL_ESTIMATORS[config.kl_estimator](x)
    return penalties


def _rewards(groups: Sequence[GroupBatch], trajectories: Sequence[TrajectoryId]) -> torch.Tensor:
    rewards = {name: reward for group in groups for name, reward in group.rewards.items()}
    return torch.tensor([rewards[name] for name in trajectories], dtype=torch.float64)


def _group_advantages(
    config: ObjectiveConfig,
    groups: Sequence[GroupBatch],
    tokens: BatchTokens,
    chains: Chains,
    penalties: torch.Tensor,
) -> torch.Tensor:
    """A graded member without a token here keeps its reward in the baseline."""
    lost = torch.zeros(len(tokens.trajectories), dtype=torch.float64)
    lost = lost.index_add(0, chains.chain, penalties[chains.tokens])
    penalty = dict(zip(tokens.trajectories, lost.tolist(), strict=True))
    found: dict[TrajectoryId, float] = {}
    for group in groups:
        found |= group_advantages(
            config.advantage, {name: reward - penalty.get(name, 0.0) for name, reward in group.rewards.items()}
        )
    by_trajectory = torch.tensor([found[name] for name in tokens.trajectories], dtype=torch.float64)
    return torch.where(tokens.valid(config), by_trajectory[tokens.sequence], torch.zeros(len(tokens.sequence)).double())
