"""From logits to the distribution a token is drawn from, and to the record of what was left out.

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

_MASS_ROUNDING = 1e-6
"""A kept set whose mass misses top_p by this much has reached it: sums of float32 probabilities are no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDistribution:
    """What tokens are drawn from."""

    probs: Tensor
    """float32 [B, V]: renormalised over the kept tokens, 0 elsewhere."""
    kept: Tensor | None
    """bool [B, V]: tokens that survived. None: no row asks for truncation."""


def sampling_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> SamplingDistribution:
    """The distribution of each row of float32 logits [B, V]: temperature, then top_k, top_p, min_p, each on what the
    one before left, renormalised. The most likely token always survives; equal ones survive in order of their ids.
    """
    temperature = _column([p.temperature for p in params], logits)
    scaled = logits / temperature
    if not any(p.truncates for p in params):
        return SamplingDistribution(probs=torch.softmax(scaled, dim=1), kept=None)
    kept = _kept_mask(scaled, params)
    return SamplingDistribution(probs=torch.softmax(scaled.masked_fill(~kept, -torch.inf), dim=1), kept=kept)


def kept_sets(kept: Tensor) -> KeptSets:
    """The record of a mask, bool [B, V]. A row from which nothing was removed gets the empty range: *full*."""
    cut = kept & ~kept.all(dim=1, keepdim=True)
    counts = cut.sum(dim=1).cpu().numpy()
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=cut.nonzero()[:, 1].cpu().numpy().astype(np.int32))


def _kept_mask(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    vocab = scaled.shape[1]
    top_k = _column([p.top_k or vocab for p in params], scaled)
    kept = torch.arange(vocab, device=scaled.device) < top_k
    probs = torch.softmax(ordered.masked_fill(~kept, -torch.inf), dim=1)
    mass_before = probs.cumsum(dim=1) - probs
    top_p = _column([p.top_p if p.top_p < 1 else torch.inf for p in params], scaled)
    kept &= mass_before < top_p - _MASS_ROUNDING
    kept &= probs >= _column([p.min_p for p in params], scaled) * probs[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter(1, ids, kept)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """float32 [B, 1] on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
