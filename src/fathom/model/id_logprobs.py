"""Log-probabilities of many ids at each token: of given ones with gradient, and of the likeliest ones.

Letters: N tokens, H hidden size, V vocabulary, K ids over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fathom.core.records.bias import TokenBias
from fathom.core.records.scores import IdLists, IdScores
from fathom.core.records.trajectory import KeptSets
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import BLOCK_BYTES, scaled_logits


def log_distribution(scaled: Tensor, kept: KeptSets | None) -> Tensor:
    """float32 [N, V]: log softmax of float32 [N, V] scaled logits over each token's kept set, -inf outside it.
    Differentiable."""
    if kept is not None:
        scaled = scaled.masked_fill(_removed(kept, scaled.shape[1]).to(scaled.device), -torch.inf)
    return scaled.log_softmax(dim=1)


def id_logprobs(scaled: Tensor, kept: KeptSets | None, lists: IdLists) -> Tensor:
    """float32 [K]: log-probabilities of the ids of `lists` at each token, at most 0; -inf outside the token's kept set.
    Differentiable.

    Args:
        scaled: float32 [N, V], see `scaled_logits`.
        kept: kept sets of the N tokens. None, or an empty range: the full vocabulary.
        lists: ids of the N tokens.
    """
    places, ids = (torch.from_numpy(part).to(scaled.device) for part in (lists.places, lists.ids.astype(np.int64)))
    return log_distribution(scaled, kept)[places, ids].clamp(max=0.0)


def likeliest(scaled: Tensor, kept: KeptSets | None, count: int) -> IdScores:
    """The `count` likeliest ids of each token of float32 [N, V] scaled logits; fewer where its kept set has fewer."""
    logprobs = log_distribution(scaled, kept)
    values, ids = logprobs.topk(min(count, scaled.shape[1]), dim=1)
    ids, order = ids.sort(dim=1)
    values = values.gather(1, order).clamp(max=0.0)
    present = ~values.isneginf()
    offsets = np.concatenate([[0], np.cumsum(present.sum(dim=1).cpu().numpy())]).astype(np.int64)
    lists = IdLists(offsets=offsets, ids=ids[present].cpu().numpy().astype(np.int32))
    return IdScores(lists=lists, logprobs=values[present].cpu().numpy())


def head_id_logprobs(
    model: LanguageModel,
    hidden: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None,
    lists: IdLists,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """`id_logprobs` of hidden states [N, H], block by block; a block's logits are computed again in the backward."""
    parts: list[Tensor] = []
    for block in _blocks(len(hidden), model.shape.vocab_size, block_bytes):
        arguments = (model, hidden[block], temperature[block], *_cut(block, kept, bias), _cut_lists(lists, block))
        recompute = torch.is_grad_enabled()
        parts.append(checkpoint(_id_block, *arguments, use_reentrant=False) if recompute else _id_block(*arguments))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def head_likeliest(
    model: LanguageModel,
    hidden: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None,
    count: int,
    block_bytes: int = BLOCK_BYTES,
) -> IdScores:
    """`likeliest` of hidden states [N, H], block by block."""
    parts: list[IdScores] = []
    for block in _blocks(len(hidden), model.shape.vocab_size, block_bytes):
        kept_block, bias_block = _cut(block, kept, bias)
        scaled = scaled_logits(model.logits(hidden[block]), temperature[block], bias_block)
        parts.append(likeliest(scaled, kept_block, count))
    counts = np.concatenate([[0], *(np.diff(part.lists.offsets) for part in parts)])
    ids = np.concatenate([np.empty(0, np.int32), *(part.lists.ids for part in parts)])
    logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)])
    return IdScores(lists=IdLists(offsets=np.cumsum(counts).astype(np.int64), ids=ids), logprobs=logprobs)


def _id_block(
    model: LanguageModel,
    hidden: Tensor,
    temperature: Tensor,
    kept: KeptSets | None,
    bias: TokenBias | None,
    lists: IdLists,
) -> Tensor:
    return id_logprobs(scaled_logits(model.logits(hidden), temperature, bias), kept, lists)


def _blocks(count: int, vocab_size: int, block_bytes: int) -> Iterator[slice]:
    rows = max(1, block_bytes // (4 * vocab_size))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def _cut(block: slice, kept: KeptSets | None, bias: TokenBias | None) -> tuple[KeptSets | None, TokenBias | None]:
    places = np.arange(block.start, block.stop)
    return kept.select(places) if kept is not None else None, bias.select(places) if bias is not None else None


def _cut_lists(lists: IdLists, block: slice) -> IdLists:
    offsets = lists.offsets[block.start : block.stop + 1]
    return IdLists(offsets=offsets - offsets[0], ids=lists.ids[offsets[0] : offsets[-1]])


def _removed(kept: KeptSets, vocab_size: int) -> Tensor:
    """bool [N, V]: ids that did not survive."""
    counts = np.diff(kept.offsets)
    removed = np.repeat((counts > 0)[:, None], vocab_size, axis=1)
    removed[np.repeat(np.arange(len(counts)), counts), kept.ids] = False
    return torch.from_numpy(removed)
