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

_FIRST_WIDTH = 512
"""Likeliest tokens that are looked at before the whole vocabulary is ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDistribution:
    """What tokens are drawn from."""

    probs: Tensor
    """float32 [B, V]: renormalised over the kept tokens, 0 elsewhere."""
    kept: Tensor | None
    """bool [B, V]: tokens that survived. None: no row asks for truncation."""


def sampling_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> SamplingDistribution:
    """The distribution of each row of float32 logits [B, V]: temperature, then top_k, top_p, min_p, each on what the
    one before left, renormalised. The most likely token always survives; of equally likely ones at a set's edge, which
    survive is up to the backend (the record says).
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
    """bool [B, V]. Ordering a whole vocabulary is slow, so the likeliest tokens are tried first."""
    vocab = scaled.shape[1]
    kept = torch.ones_like(scaled, dtype=torch.bool)
    rows = [row for row, own in enumerate(params) if own.truncates]
    cut, own = scaled[rows], [params[row] for row in rows]
    ids, among, whole = _kept_among_likeliest(cut, own, min(_FIRST_WIDTH, vocab))
    if not whole:
        ids, among, _ = _kept_among_likeliest(cut, own, vocab)
    kept[rows] = torch.zeros_like(kept[rows]).scatter(1, ids, among)
    return kept


def _kept_among_likeliest(scaled: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor, bool]:
    """The `width` likeliest tokens of each row, most likely first: ids [B, width], which of them are kept
    [B, width], and whether every row's kept set is known by them alone."""
    vocab = scaled.shape[1]
    ordered, ids = scaled.topk(width, dim=1)
    top_k = _column([p.top_k or vocab for p in params], scaled)
    top_p = _column([p.top_p if p.top_p < 1 else torch.inf for p in params], scaled)
    min_p = _column([p.min_p for p in params], scaled)

    kept = torch.arange(width, device=scaled.device) < top_k
    of_kept = ordered.masked_fill(~kept, -torch.inf).logsumexp(dim=1, keepdim=True)
    normaliser = torch.where(top_k < vocab, of_kept, scaled.logsumexp(dim=1, keepdim=True))
    probs = (ordered - normaliser).exp()
    kept &= probs.cumsum(dim=1) - probs < top_p - _MASS_ROUNDING
    kept &= probs >= min_p * probs[:, :1]
    kept[:, 0] = True
    ends_inside = (top_k >= vocab) & ~kept[:, -1:]
    return ids, kept, width == vocab or bool(((top_k <= width) | ends_inside).all())


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """float32 [B, 1] on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
