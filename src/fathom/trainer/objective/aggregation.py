"""From token losses to one number, whatever the micro-batches (`algorithms.md` D.9). Letters: N tokens, B trajectories.

Every mode is a weighted sum over tokens whose coefficients depend on the whole optimizer step alone. A micro-batch
adds the terms of its own tokens, so any cut and any order adds up to the same loss and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import Aggregation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What the losses of one optimizer step are divided by; known before its first micro-batch."""

    tokens: int
    """N: tokens that count."""
    sequences: int
    """B: trajectories of the step, those without a token that counts included."""
    sequences_with_tokens: int
    """B_v: trajectories with a token that counts."""
    tokens_per_sequence: torch.Tensor
    """Int64 [B]: tokens that count, over all rows of the trajectory."""


def count(sequence: torch.Tensor, counted: torch.Tensor, sequences: int) -> Denominators:
    """Denominators over the tokens marked in `counted`; `sequence` has each token's trajectory, in [0, B)."""
    tokens_per_sequence = torch.bincount(sequence[counted], minlength=sequences)
    return Denominators(
        tokens=int(tokens_per_sequence.sum()),
        sequences=sequences,
        sequences_with_tokens=int((tokens_per_sequence > 0).sum()),
        tokens_per_sequence=tokens_per_sequence,
    )


def _evenly(sequence: torch.Tensor, denominator: int) -> torch.Tensor:
    return torch.full(sequence.shape, 1 / max(1, denominator), dtype=torch.float64, device=sequence.device)


def token_mean(step: Denominators, sequence: torch.Tensor, length: int | None) -> torch.Tensor:
    """1 / N: every token counts the same."""
    return _evenly(sequence, step.tokens)


def seq_mean_token_mean(step: Denominators, sequence: torch.Tensor, length: int | None) -> torch.Tensor:
    """1 / (B_v n_i): every trajectory counts the same, however many rows and tokens it has."""
    tokens = step.tokens_per_sequence.to(torch.float64)[sequence].clamp(min=1)
    return _evenly(sequence, step.sequences_with_tokens) / tokens


def seq_mean_token_sum(step: Denominators, sequence: torch.Tensor, length: int | None) -> torch.Tensor:
    """1 / B_v: the mean over trajectories of their sums."""
    return _evenly(sequence, step.sequences_with_tokens)


def seq_mean_token_sum_norm(step: Denominators, sequence: torch.Tensor, length: int | None) -> torch.Tensor:
    """1 / (B L) with a constant L: no bias by length. B counts trajectories without tokens too. arXiv 2503.20783."""
    assert length is not None, "ObjectiveConfig requires constant_length with this mode"
    return _evenly(sequence, step.sequences * length)


AGGREGATIONS: dict[Aggregation, Callable[[Denominators, torch.Tensor, int | None], torch.Tensor]] = {
    Aggregation.TOKEN_MEAN: token_mean,
    Aggregation.SEQ_MEAN_TOKEN_MEAN: seq_mean_token_mean,
    Aggregation.SEQ_MEAN_TOKEN_SUM: seq_mean_token_sum,
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: seq_mean_token_sum_norm,
}
"""Each gives float64 [N], the coefficient of every token's loss. Empty denominators count as 1: the loss is then 0."""
