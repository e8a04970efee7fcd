"""The one place where logits become log-probabilities and sampling distributions; always in float32.

Letters: N tokens, H hidden size, V vocabulary, B rows of logits, K largest kept set.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fathom.core.errors import RecordError
from fathom.core.records.trajectory import KeptSets
from fathom.model.language_model import LanguageModel

BLOCK_BYTES = 64 * 2**20
"""Size of one float32 [rows, V] block of logits. About four of this size live at a time."""

_KEPT_BLOCKS = 2
"""Blocks that may wait for the backward; of more, the logits are computed again there."""


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: Tensor, kept: KeptSets | None) -> Tensor:
    """Log-probabilities of tokens under the distribution they were sampled from. Differentiable.

    `log softmax(logits / temperature)[token]`, the softmax taken over the token's kept set.

    Args:
        logits: float32 [N, V].
        token_ids: int64 [N].
        temperature: float32 [N], > 0.
        kept: kept sets of the N tokens. None, or an empty range: the full vocabulary.

    Returns:
        float32 [N], finite for finite logits, at most 0.

    Raises:
        RecordError: a token is not in its own kept set, so it cannot have been sampled from it.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"log-probabilities are computed in float32, got logits in {logits.dtype}")
    scaled = logits / temperature.unsqueeze(1)
    chosen = scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    normaliser = torch.logsumexp(scaled, dim=1) if kept is None else _kept_logsumexp(scaled, token_ids, kept)
    # The difference is at most 0 but for rounding.
    return (chosen - normaliser).clamp(max=0.0)


def head_logprobs(
    model: LanguageModel,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """`token_logprobs` of hidden states [N, H], without ever holding logits of all N tokens.

    Blocks of rows are computed one by one. When there are many of them and a gradient is needed, their logits are not
    kept but computed again in the backward.
    """
    rows = max(1, block_bytes // (4 * model.shape.vocab_size))
    recompute = torch.is_grad_enabled() and len(hidden) > _KEPT_BLOCKS * rows
    parts: list[Tensor] = []
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        kept_block = kept.select(np.arange(len(hidden))[block]) if kept is not None else None
        arguments = (model, hidden[block], token_ids[block], temperature[block], kept_block)
        parts.append(checkpoint(_head_block, *arguments, use_reentrant=False) if recompute else _head_block(*arguments))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _head_block(
    model: LanguageModel, hidden: Tensor, token_ids: Tensor, temperature: Tensor, kept: KeptSets | None
) -> Tensor:
    return token_logprobs(model.logits(hidden), token_ids, temperature, kept)


def _kept_logsumexp(scaled: Tensor, token_ids: Tensor, kept: KeptSets) -> Tensor:
    """float32 [N]: the normaliser of each row over its kept ids, or over all where the range is empty."""
    counts = np.diff(kept.offsets)
    normaliser = scaled.new_empty(len(counts))
    full, cut = np.flatnonzero(counts == 0), np.flatnonzero(counts)
    if len(full):
        rows = torch.from_numpy(full).to(scaled.device)
        normaliser = normaliser.index_copy(0, rows, torch.logsumexp(scaled[rows], dim=1))
    if len(cut):
        rows = torch.from_numpy(cut).to(scaled.device)
        ids, present = (tensor.to(scaled.device) for tensor in _padded(kept, cut, int(counts.max())))
        if not bool((present & (ids == token_ids[rows].unsqueeze(1))).any(dim=1).all()):
            raise RecordError("a token is not in its own kept set")
        values = scaled[rows.unsqueeze(1), ids].masked_fill(~present, -torch.inf)
        normaliser = normaliser.index_copy(0, rows, torch.logsumexp(values, dim=1))
    return normaliser


def _padded(kept: KeptSets, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
    """int64 [R, K] kept ids of these rows, and bool [R, K]: which of them are real."""
    present = np.arange(width) < np.diff(kept.offsets)[rows, None]
    ids = np.zeros(present.shape, dtype=np.int64)
    ids[present] = kept.ids  # rows with an empty range hold no ids, so all of them belong to `rows`, in order
    return torch.from_numpy(ids), torch.from_numpy(present)
