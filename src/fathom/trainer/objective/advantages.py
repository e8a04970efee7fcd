"""Advantages from the rewards of a group (`algorithms.md` D.1). Letters: G graded members."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fathom.config.families import Advantage
from fathom.core.ids import TrajectoryId

STD_EPSILON = 1e-6
"""Added to the standard deviation by GRPO."""


def grpo(rewards: torch.Tensor) -> torch.Tensor:
    """(R - mean) / (std + 1e-6) with the sample standard deviation (G - 1 in its denominator). arXiv 2402.03300."""
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + STD_EPSILON)


def dr_grpo(rewards: torch.Tensor) -> torch.Tensor:
    """R - mean. arXiv 2503.20783."""
    return rewards - rewards.mean()


def rloo(rewards: torch.Tensor) -> torch.Tensor:
    """R minus the mean of the others, which is G / (G - 1) * (R - mean). arXiv 2402.14740."""
    size = len(rewards)
    return (rewards - rewards.mean()) * (size / (size - 1))


def maxrl(rewards: torch.Tensor) -> torch.Tensor:
    """(R - mean) / mean, for rewards of at least 0; 0 where the mean is 0. arXiv 2602.02710."""
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else torch.zeros_like(rewards)


def raft(rewards: torch.Tensor) -> torch.Tensor:
    """1 for the members with the largest reward, 0 for all others: nothing is pushed down. RAFT++, arXiv 2504.11343."""
    return (rewards == rewards.max()).to(rewards.dtype)


ADVANTAGES: dict[Advantage, Callable[[torch.Tensor], torch.Tensor]] = {
    Advantage.GRPO: grpo,
    Advantage.DR_GRPO: dr_grpo,
    Advantage.RLOO: rloo,
    Advantage.MAXRL: maxrl,
    Advantage.RAFT: raft,
}
"""Each takes float64 [G] with at least two different rewards."""


def group_advantages(kind: Advantage, rewards_by_member: Mapping[TrajectoryId, float]) -> dict[TrajectoryId, float]:
    """Advantage of every graded member, whether or not it has rows: its reward was observed.

    A group whose rewards are all equal, one member included, tells nothing apart: every advantage is exactly 0.
    """
    rewards = torch.tensor(list(rewards_by_member.values()), dtype=torch.float64)
    constant = len(rewards) == 0 or bool((rewards == rewards[0]).all())
    advantages = torch.zeros_like(rewards) if constant else ADVANTAGES[kind](rewards)
    return dict(zip(rewards_by_member, advantages.tolist(), strict=True))
