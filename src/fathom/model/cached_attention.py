"""Keys and values of running sequences, and the plans that read and write them.

Letters: B sequences of a forward, T its tokens, Hq query heads, Hkv key/value heads, D head size, L cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fathom.model.attention import AttentionPlan, PackedAttention
from fathom.model.language_model import ModelShape


@final
class KvCache:
    """One contiguous place (a slot) per sequence, in every layer. The caller owns the slots and knows their lengths."""

    def __init__(
        self, shape: ModelShape, *, slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Memory for `slots` sequences of at most `max_tokens` tokens each."""
        size = (slots, shape.kv_heads, max_tokens)
        self.max_tokens = max_tokens
        self.keys = [torch.zeros(*size, shape.head_dim, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [
            torch.zeros(*size, shape.value_head_dim, dtype=dtype, device=device) for _ in range(shape.layers)
        ]

    def prefill(self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> AttentionPlan:
        """A plan for a packed forward of `lengths[i]` tokens that follow the first `starts[i]` of slot `slots[i]`."""
        self._check(slots, [start + length for start, length in zip(starts, lengths, strict=True)])
        return Prefill(self, slots, starts, lengths)

    def decode(self, slots: Sequence[int], lengths: Sequence[int]) -> AttentionPlan:
        """A plan for a forward of one token per slot; slot `slots[i]` holds `lengths[i]` tokens before it.

        Ascending neighbouring slots are fastest: their memory is read in place.
        """
        self._check(slots, [length + 1 for length in lengths])
        return Decode(self, slots, lengths)

    def copy_prefix(self, from_slot: int, to_slots: Sequence[int], length: int) -> None:
        """Give other slots the first `length` tokens of a slot."""
        for tensor in (*self.keys, *self.values):
            tensor[list(to_slots), :, :length] = tensor[from_slot, :, :length]

    def _check(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        if len(slots) != len(ends) or len(set(slots)) != len(slots):
            raise ValueError(f"each sequence needs its own slot: slots {list(slots)} for {len(ends)} sequences")
        if max(ends) > self.max_tokens:
            raise ValueError(f"a sequence of {max(ends)} tokens does not fit into slots of {self.max_tokens}")


@final
class Prefill:
    """Several new tokens for each of several slots, packed. Made by `KvCache.prefill`."""

    def __init__(self, cache: KvCache, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> None:
        self._cache = cache
        self._spans = list(zip(slots, starts, lengths, strict=True))
        self.tokens = sum(lengths)
        self._fresh = None if any(starts) else PackedAttention(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`. Keys and values are stored first."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        parts: list[Tensor] = []
        begin = 0
        for slot, start, length in self._spans:
            fresh, place = slice(begin, begin + length), slice(start, start + length)
            keys[slot, :, place] = key[0, :, fresh]
            values[slot, :, place] = value[0, :, fresh]
            if self._fresh is None:
                seen = slice(0, start + length)
                parts.append(_continue(query[:, :, fresh], keys[slot, :, seen], values[slot, :, seen], scaling))
            begin += length
        return self._fresh.attend(layer, query, key, value, scaling) if self._fresh else torch.cat(parts, dim=1)


@final
class Decode:
    """One new token for each of several slots. Made by `KvCache.decode`."""

    def __init__(self, cache: KvCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        device = cache.keys[0].device
        self._cache = cache
        self.tokens = len(slots)
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.tensor(lengths, device=device)
        self._longest = max(lengths) + 1
        self._range = slice(slots[0], slots[0] + len(slots))
        self._adjacent = list(slots) == list(range(self._range.start, self._range.stop))
        seen = torch.arange(self._longest, device=device) <= self._positions.unsqueeze(1)
        self._seen = None if min(lengths) == max(lengths) else seen[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`. Keys and values are stored first."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self._positions] = key[0].transpose(0, 1)
        values[self._slots, :, self._positions] = value[0].transpose(0, 1)
        # The query heads of one key/value head become its queries: [1, Hq, B, D] to [B, Hkv, Hq / Hkv, D].
        grouped = query[0].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        mixed = scaled_dot_product_attention(
            grouped, self._held(keys), self._held(values), attn_mask=self._seen, scale=scaling
        )
        return mixed.flatten(1, 2).unsqueeze(0)

    def _held(self, tensor: Tensor) -> Tensor:
        """[B, Hkv, L, D]: what these slots hold, up to the longest."""
        held = tensor[:, :, : self._longest]
        return held[self._range] if self._adjacent else held.index_select(0, self._slots)


def _continue(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last T of L tokens: query [1, Hq, T, D], keys and values [Hkv, L, D] to [1, T, Hq, D]."""
    new, total = query.shape[2], keys.shape[1]
    seen = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    mixed = scaled_dot_product_attention(
        query, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2)
