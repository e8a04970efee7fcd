"""The one place where logits become log-probabilities; always in float32.

Letters: N tokens, H hidden size, V vocabulary, R rows with as many places to choose from, W places of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fathom.core.errors import RecordError
from fathom.core.records.bias import TokenBias
from fathom.core.records.trajectory import KeptSets
from fathom.model.distribution.blockwise import BLOCK, chosen_logprobs, entropies
from fathom.model.language_model import LanguageModel

BLOCK_BYTES = 64 * 2**20
"""Size of one float32 [rows, V] block of logits. About four of this size live at a time."""

_KEPT_BLOCKS = 2
"""Blocks that may wait for the backward; of more, the logits are computed again there."""

_NARROWEST = 16
"""Smallest number of places that a kept set is filled up to."""


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, kept: KeptSets | None, bias: TokenBias | None = None
) -> Tensor:
    """Log-probabilities of tokens under the distribution they were sampled from. Differentiable.

    `log softmax((logits + bias) / temperature)[token]`, the softmax taken over the token's kept set. On a CPU the bits
    of a row depend on that row alone, whatever the others are.

    Args:
        logits: float32 [N, V].
        token_ids: int64 [N].
        temperature: float32 [N], > 0.
        kept: kept sets of the N tokens. None, or an empty range: the full vocabulary.
        bias: biases of the N tokens. None: no token has one.

    Returns:
        float32 [N], finite for finite logits, at most 0.

    Raises:
        RecordError: a token is not in its own kept set, so it cannot have been sampled from it.
    """
    return _chosen(scaled_logits(logits, temperature, bias), token_ids, kept)


def token_entropies(
    logits: Tensor, temperature: Tensor, kept: KeptSets | None, bias: TokenBias | None = None
) -> Tensor:
    """Entropies -sum p log p of the distributions that tokens were sampled from. Differentiable.

    Arguments as of `token_logprobs`; `algorithms.md` D.8.

    Returns:
        float32 [N], finite for finite logits, at least 0.
    """
    return _entropies(scaled_logits(logits, temperature, bias), kept)


def _entropies(scaled: Tensor, kept: KeptSets | None) -> Tensor:
    if kept is None:
        return entropies(scaled)
    found = scaled.new_empty(len(scaled))
    for choice in choices(scaled, kept):
        rows = torch.from_numpy(choice.rows).to(scaled.device)
        found = found.index_copy(0, rows, entropies(choice.values))
    return found


def _chosen(scaled: Tensor, token_ids: Tensor, kept: KeptSets | None) -> Tensor:
    if kept is None:
        return chosen_logprobs(scaled, token_ids)
    found = scaled.new_empty(len(token_ids))
    for choice in choices(scaled, kept):
        rows = torch.from_numpy(choice.rows).to(scaled.device)
        places = token_ids[rows] if choice.ids is None else _places(choice.ids, choice.values, token_ids[rows])
        found = found.index_copy(0, rows, chosen_logprobs(choice.values, places))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """What the head tells of N tokens."""

    logprobs: Tensor
    """float32 [N]: `token_logprobs`."""
    entropies: Tensor | None
    """float32 [N]: `token_entropies`. None: not asked for."""


def head_outputs(
    model: LanguageModel,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None = None,
    *,
    with_entropies: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> HeadOutputs:
    """`token_logprobs`, and `token_entropies` if asked for, of hidden states [N, H].

    Never are logits of all N tokens held: blocks of rows are computed one by one. When there are many of them and a
    gradient is needed, their logits are not kept but computed again in the backward.
    """
    rows = max(1, block_bytes // (4 * model.shape.vocab_size))
    recompute = torch.is_grad_enabled() and len(hidden) > _KEPT_BLOCKS * rows
    head = _head_with_entropies if with_entropies else _head_block
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        places = np.arange(len(hidden))[block]
        kept_block = kept.select(places) if kept is not None else None
        bias_block = bias.select(places) if bias is not None else None
        arguments = (model, hidden[block], token_ids[block], temperature[block], kept_block, bias_block)
        parts.append(checkpoint(head, *arguments, use_reentrant=False) if recompute else head(*arguments))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    if not columns:
        columns = [hidden.new_zeros(0, dtype=torch.float32)] * (2 if with_entropies else 1)
    return HeadOutputs(logprobs=columns[0], entropies=columns[1] if with_entropies else None)


def scaled_logits(logits: Tensor, temperature: Tensor, bias: TokenBias | None) -> Tensor:
    """float32 [N, V]: what the softmax is taken of, `(logits + bias) / temperature`; `logits` itself where it is that.

    Raises:
        TypeError: the logits are not float32.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"log-probabilities are computed in float32, got logits in {logits.dtype}")
    if bias is not None:
        rows, ids, values = (torch.from_numpy(part).to(logits.device) for part in bias.entries())
        logits = logits.index_put((rows, ids), values, accumulate=True)
    return logits / temperature.unsqueeze(1) if bool((temperature != 1).any()) else logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rows whose token is chosen from as many places."""

    rows: np.ndarray
    """int64 [R]: which rows."""
    ids: Tensor | None
    """int64 [R, W]: token ids of the places, ascending, then zeros. None: the full vocabulary, place by place."""
    values: Tensor
    """float32 [R, W]: their values, then -inf."""


def choices(scaled: Tensor, kept: KeptSets) -> Iterator[Choice]:
    """Rows of float32 [N, V] values by the size of their kept sets.

    A set is filled up to a width that follows from its own size alone, so that its sums do not depend on others.
    """
    counts = np.diff(kept.offsets)
    full, cut = np.flatnonzero(counts == 0), np.flatnonzero(counts)
    if len(full):
        yield Choice(rows=full, ids=None, values=_rows(scaled, full))
    if not len(cut):
        return
    widths = _width(counts[cut])
    ids, present = (tensor.to(scaled.device) for tensor in _padded(kept, cut, int(widths.max())))
    values = _rows(scaled, cut).gather(1, ids).masked_fill(~present, -torch.inf)  # one gather: one dense gradient
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        yield Choice(rows=cut[rows], ids=_rows(ids, rows)[:, :width], values=_rows(values, rows)[:, :width])


def _rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """These rows, ascending; the tensor itself where they are all."""
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]


def _width(counts: np.ndarray) -> np.ndarray:
    """A power of two up to a block, whole blocks beyond: every block holds a kept id."""
    powers = np.maximum(2 ** np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64), _NARROWEST)
    return np.where(counts <= BLOCK, powers, -(-counts // BLOCK) * BLOCK)


def _padded(kept: KeptSets, rows: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
    """int64 [R, W] kept ids of these rows, and bool [R, W]: which of them are real."""
    counts = np.diff(kept.offsets)[rows]
    present = np.arange(width) < counts[:, None]
    ids = np.zeros(present.shape, dtype=np.int64)
    ids[present] = kept.select(rows).ids
    return torch.from_numpy(ids), torch.from_numpy(present)


def _places(ids: Tensor, values: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [R]: where each token is among its ids."""
    found = (ids == token_ids.unsqueeze(1)) & ~torch.isneginf(values)
    if not bool(found.any(dim=1).all()):
        raise RecordError("a token is not in its own kept set")
    return found.int().argmax(dim=1)


def _head_block(
    model: LanguageModel,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None,
) -> tuple[Tensor]:
    return (token_logprobs(model.logits(hidden), token_ids, temperature, kept, bias),)


def _head_with_entropies(
    model: LanguageModel,
    hidden: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None,
) -> tuple[Tensor, Tensor]:
    scaled = scaled_logits(model.logits(hidden), temperature, bias)
    return _chosen(scaled, token_ids, kept), _entropies(scaled, kept)
