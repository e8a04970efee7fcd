"""Keys and values of running sequences in pages, and the plan that reads and writes them.

Letters: B sequences of a forward, T its tokens, P pages of the longest sequence, Hq query heads, Hkv key/value heads,
D head size, L tokens of one sequence.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fathom.model.attention import AttentionPlan
from fathom.model.kernels.cpu_attention import PAGE_TOKENS
from fathom.model.kernels.tiled_attention import TiledAttention, computes, page_shapes
from fathom.model.language_model import ModelShape


@final
class KvPages:
    """Memory for keys and values, in pages that any sequence may read. The caller owns the pages.

    A page may be shared by sequences that agree on all its tokens so far; only the owner of a page may write to it.
    """

    def __init__(self, shape: ModelShape, *, pages: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Memory for `pages` pages of `PAGE_TOKENS` tokens in every layer."""
        shapes = page_shapes(pages, shape.kv_heads, shape.head_dim, shape.value_head_dim)
        self.pages = pages
        self.keys, self.values = (
            [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)] for size in shapes
        )

    def plan(self, tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> AttentionPlan:
        """A plan for a packed forward in which sequence b has `lengths[b]` new tokens after its first `starts[b]`.

        Args:
            tables: int64 [B, P]; `tables[b, i]` is the page of tokens `[i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)` of
                sequence b. Entries past its last token are ignored.
            starts: int64 [B]: tokens whose keys and values lie in the pages already.
            lengths: int64 [B], each at least 1; they add up to T.

        Returns:
            A plan that stores the new keys and values, then attends causally, each sequence to itself alone.
        """
        keys, values = self.keys[0], self.values[0]
        if computes(keys.dtype, keys.device, values.shape[3]):
            return PagedByKernel(self, tables, starts, lengths)
        return PagedByTorch(self, tables, starts, lengths)

    def copy(self, from_page: int, to_page: int) -> None:
        """Give a page the content of another, in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[to_page] = tensor[from_page]


@final
class PagedByKernel:
    """By the CPU kernel, which reads the pages in place. Made by `KvPages.plan`."""

    def __init__(self, kv: KvPages, tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._kv = kv
        self._tiled = TiledAttention(tables, starts, lengths)
        self.tokens = self._tiled.tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        return self._tiled.attend(query, key, value, scaling, self._kv.keys[layer], self._kv.values[layer])


@final
class PagedByTorch:
    """By torch, which gathers the pages of each sequence first. Made by `KvPages.plan`."""

    def __init__(self, kv: KvPages, tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        device = kv.keys[0].device
        self._kv = kv
        self._spans = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        self._pages = [
            torch.from_numpy(tables[b, : -(-(start + length) // PAGE_TOKENS)].astype(np.int64)).to(device)
            for b, (start, length) in enumerate(self._spans)
        ]
        positions = np.concatenate([np.arange(start, start + length) for start, length in self._spans])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        self._page = torch.from_numpy(tables[rows, positions // PAGE_TOKENS].astype(np.int64)).to(device)
        self._offset = torch.from_numpy(positions % PAGE_TOKENS).to(device)
        self.tokens = len(positions)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys[self._page, :, :, self._offset] = key[0, :, : self.tokens].transpose(0, 1)
        values[self._page, :, self._offset] = value[0, :, : self.tokens].transpose(0, 1)
        parts: list[Tensor] = []
        begin = 0
        for (start, length), pages in zip(self._spans, self._pages, strict=True):
            end = start + length
            seen = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
            mixed = scaled_dot_product_attention(
                query[:, :, begin : begin + length],
                _held(keys.transpose(2, 3), pages, end),
                _held(values, pages, end),
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )
            parts.append(mixed.transpose(1, 2))
            begin += length
        if padding := query.shape[2] - self.tokens:
            parts.append(parts[0].new_zeros(1, padding, *parts[0].shape[2:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _held(tensor: Tensor, pages: Tensor, length: int) -> Tensor:
    """[1, Hkv, L, D]: the first `length` tokens that lie in these pages."""
    return tensor.index_select(0, pages).transpose(0, 1).flatten(1, 2)[None, :, :length]
