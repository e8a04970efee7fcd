"""One packed forward's attention on the CPU kernel: what to compute, in which tiles, by how many threads.

Letters: B sequences, T tokens of the forward, P pages of the longest sequence, Hq query heads, Hkv key/value heads,
D size of a query or key head, E size of a value head.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.model.kernels.cpu_attention import BFLOAT16, FLOAT32, LANES, PAGE_TOKENS, TILE_ROWS, attend, store

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_ALONE = 2e7
"""Multiply-adds of a layer that one thread computes sooner than several threads agree."""


def computes(dtype: torch.dtype, device: torch.device, value_dims: int) -> bool:
    """Whether the kernel computes tensors of this type and place, with value heads of this size."""
    return dtype in _KINDS and device.type == "cpu" and value_dims % LANES == 0


def page_shapes(pages: int, kv_heads: int, dims: int, value_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a layer's keys and values: [pages, Hkv, D, PAGE_TOKENS] and [pages, Hkv, PAGE_TOKENS, E]."""
    return (pages, kv_heads, dims, PAGE_TOKENS), (pages, kv_heads, PAGE_TOKENS, value_dims)


@final
class TiledAttention:
    """Stores a layer's new keys and values in pages, then lets every new token attend to all up to itself."""

    def __init__(self, tables: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Sequence b has `lengths[b]` new tokens after its first `starts[b]`; see `KvPages.plan`."""
        self._tables = np.ascontiguousarray(tables, dtype=np.int64)
        self._starts, self._lengths = starts.astype(np.int64), lengths.astype(np.int64)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        first = np.cumsum(self._lengths) - self._lengths
        within = np.arange(len(rows)) - first[rows]
        positions = self._starts[rows] + within
        self.tokens = len(rows)
        self._page_of = self._tables[rows, positions // PAGE_TOKENS]
        self._offset_of = positions % PAGE_TOKENS
        self._tiles: dict[int, np.ndarray] = {}
        self._seen = positions + 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, keys: Tensor, values: Tensor) -> Tensor:
        """Attend.

        Args:
            query: [1, Hq, T, D]; a forward may have more than the plan's tokens: their output is zero.
            key: [1, Hkv, T, D].
            value: [1, Hkv, T, E].
            scaling: factor of the scores.
            keys: pages of this layer, as `page_shapes`.
            values: pages of this layer, as `page_shapes`.

        Returns:
            [1, T, Hq, E].
        """
        kind, heads, dims, value_dims = _KINDS[query.dtype], keys.shape[1], keys.shape[2], values.shape[3]
        query, key, value = _rows(query), _rows(key), _rows(value)
        place = (self._page_of, self._offset_of, heads)
        store(kind, key.data_ptr(), key.stride(1), key.stride(2), keys.data_ptr(), *place, dims, True)
        store(kind, value.data_ptr(), value.stride(1), value.stride(2), values.data_ptr(), *place, value_dims, False)
        total, group = query.shape[2], query.shape[1] // heads
        shape = (1, total, query.shape[1], value_dims)
        out = (torch.empty if total == self.tokens else torch.zeros)(shape, dtype=query.dtype)

        def run(tiles: np.ndarray) -> None:
            sources = (query.data_ptr(), query.stride(1), query.stride(2), keys.data_ptr(), values.data_ptr())
            sizes = (heads, group, dims, value_dims, np.float32(scaling))
            attend(kind, *sources, self._tables, tiles, *sizes, out.data_ptr())

        parts = self._parts(group, query.shape[1] * (dims + value_dims))
        if len(parts) == 1:
            run(parts[0])
        else:
            list(_threads(len(parts)).map(run, parts))
        return out

    def _parts(self, group: int, cost: int) -> list[np.ndarray]:
        """The tiles, cut into as many pieces of like cost as there are threads worth having."""
        tiles = self._tiles_of(group)
        threads = torch.get_num_threads()
        if threads == 1 or float(self._seen.sum()) * cost < _ALONE:
            return [tiles]
        done = np.cumsum(tiles[:, 1] * (tiles[:, 3] + tiles[:, 1]))
        cuts = np.searchsorted(done, done[-1] * np.arange(1, threads) / threads)
        return [part for part in np.split(tiles, cuts) if len(part)]

    def _tiles_of(self, group: int) -> np.ndarray:
        """int64 [N, 4]: see the kernel. As many tokens as fill a tile's rows."""
        if group not in self._tiles:
            most = max(1, TILE_ROWS // group)
            counts = -(-self._lengths // most)
            sequence = np.repeat(np.arange(len(counts)), counts)
            skipped = (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * most
            begin = (np.cumsum(self._lengths) - self._lengths)[sequence] + skipped
            tokens = np.minimum(most, self._lengths[sequence] - skipped)
            before = self._starts[sequence] + skipped
            self._tiles[group] = np.ascontiguousarray(np.stack([begin, tokens, sequence, before], axis=1))
        return self._tiles[group]


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring elements in its last dimension."""
    tensor = tensor.detach()
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="attention")
