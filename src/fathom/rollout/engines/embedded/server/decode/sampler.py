"""Draws tokens. The probability reported is computed by the function that the trainer uses.

Letters: B rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.model.logprobs import token_logprobs
from fathom.model.sampling import kept_sets, sampling_distribution


@dataclass(slots=True, kw_only=True)
class Draw:
    """One token per row."""

    token_ids: np.ndarray
    """int64 [B]."""
    logprobs: np.ndarray
    """float32 [B]: under the distribution drawn from."""
    kept: KeptSets | None
    """Kept sets of the B tokens. None: no row asks for truncation."""
    raw_logprobs: np.ndarray | None
    """float32 [B]: at temperature 1 over the full vocabulary. None: nobody asked."""


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray, raw: bool) -> Draw:
    """Draw by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: float32 [B, V].
        params: the distribution of each row.
        uniforms: float64 [B] in [0, 1).
        raw: also compute raw log-probabilities.
    """
    distribution = sampling_distribution(logits, params)
    token_ids = invert(distribution.probs, torch.from_numpy(uniforms).to(logits.device))
    kept = kept_sets(distribution.kept) if distribution.kept is not None else None
    temperature = torch.tensor([each.temperature for each in params], dtype=torch.float32, device=logits.device)
    logprobs = token_logprobs(logits, token_ids, temperature, kept)
    raw_logprobs = token_logprobs(logits, token_ids, torch.ones_like(temperature), None) if raw else None
    return Draw(
        token_ids=token_ids.cpu().numpy(),
        logprobs=logprobs.cpu().numpy(),
        kept=kept,
        raw_logprobs=raw_logprobs.cpu().numpy() if raw_logprobs is not None else None,
    )


def invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B]: the first token at which the float64 cumulative sum of `probs` passes the uniform's share of it.

    Such a token always has a positive probability.
    """
    cumulative = probs.double().cumsum(dim=1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).clamp(max=probs.shape[1] - 1)
