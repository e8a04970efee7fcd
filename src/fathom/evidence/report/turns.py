"""Turns of agents' conversations, and how much of what they repeat was computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fathom.ledger.events import TrajectoryEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSummary:
    """Over all trajectories that asked anything."""

    trajectories: int
    """How many."""
    turns_mean: float
    """Mean turns of one."""
    turns_max: int
    """Most turns of one."""
    prompt_tokens_mean: float
    """Mean prompt tokens of one, of all its turns together."""
    sampled_tokens_mean: float
    """Mean sampled tokens of one."""
    hit_rate: float
    """Prompt tokens from a prefix cache, divided by prompt tokens. 0: there were none."""
    hit_rate_bound: float
    """The same, had each turn found all that the turn before it was sent and sampled, and nothing else. Trajectories
    that share a prompt may do better; updates of the weights that empty a cache, and its pages, do worse."""


def summarise_turns(ends: Sequence[TrajectoryEnded]) -> TurnsSummary | None:
    """None: all of them are single-turn, or there are none."""
    asked = [end for end in ends if end.turns]
    if all(end.turns == 1 for end in asked):
        return None
    prompt = sum(end.prompt_tokens for end in asked)
    return TurnsSummary(
        trajectories=len(asked),
        turns_mean=sum(end.turns for end in asked) / len(asked),
        turns_max=max(end.turns for end in asked),
        prompt_tokens_mean=prompt / len(asked),
        sampled_tokens_mean=sum(end.sampled_tokens for end in asked) / len(asked),
        hit_rate=sum(end.cached_tokens for end in asked) / prompt if prompt else 0.0,
        hit_rate_bound=sum(end.known_tokens for end in asked) / prompt if prompt else 0.0,
    )
