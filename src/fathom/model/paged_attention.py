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
from fathom.model.language_model import ModelShape

PAGE_TOKENS = 32
"""Tokens of a page."""


@final
class KvPages:
    """Memory for keys and values, in pages that any sequence may read. The caller owns the pages.

    A page may be shared by sequences that agree on all its tokens so far; only the owner of a page may write to it.
    """

    def __init__(self, shape: ModelShape, *, pages: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Memory for `pages` pages of `PAGE_TOKENS` tokens in every layer."""
        size = (pages, shape.kv_heads, PAGE_TOKENS)
        self.pages = pages
        self.keys = [torch.zeros(*size, shape.head_dim, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [
            torch.zeros(*size, shape.value_head_dim, dtype=dtype, device=device) for _ in range(shape.layers)
        ]

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
        return PagedPlan(self, tables, starts, lengths)

    def copy(self, from_page: int, to_page: int) -> None:
        """Give a page the content of another, in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[to_page] = tensor[from_page]


@final
class PagedPlan:
    """Made by `KvPages.plan`."""

    def __init__(self, kv: KvPages, tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        device = kv.keys[0].device
        self._kv = kv
        ends = starts + lengths
        self._spans = list(zip(starts.tolist(), lengths.tolist(), ends.tolist(), strict=True))
        self._pages = [
            torch.from_numpy(tables[b, : -(-end // PAGE_TOKENS)].astype(np.int64)).to(device)
            for b, end in enumerate(ends.tolist())
        ]
        positions = np.concatenate([np.arange(start, end) for start, _, end in self._spans])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        self._page = torch.from_numpy(tables[rows, positions // PAGE_TOKENS].astype(np.int64)).to(device)
        self._offset = torch.from_numpy(positions % PAGE_TOKENS).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys[self._page, :, self._offset] = key[0].transpose(0, 1)
        values[self._page, :, self._offset] = value[0].transpose(0, 1)
        parts: list[Tensor] = []
        begin = 0
        for (start, length, end), pages in zip(self._spans, self._pages, strict=True):
            seen = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
            mixed = scaled_dot_product_attention(
                query[:, :, begin : begin + length],
                _held(keys, pages, end),
                _held(values, pages, end),
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )
            parts.append(mixed.transpose(1, 2))
            begin += length
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _held(tensor: Tensor, pages: Tensor, length: int) -> Tensor:
    """[1, Hkv, L, D]: the first `length` tokens that lie in these pages."""
    return tensor.index_select(0, pages).transpose(0, 1).flatten(1, 2)[None, :, :length]
