"""The one attention function of every forward. What a token attends to is decided by a plan, not by a mask.

Letters: T tokens of a packed forward (batch dimension 1), Hq query heads, Hkv key/value heads, D head size.

`transformers` hands its keyword arguments down to the attention function, so the plan travels beside the input ids and
the model definitions stay untouched. No mask function is registered: `transformers` then builds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "fathom"
"""The name under which `transformers` finds the function."""


class AttentionPlan(Protocol):
    """Computes attention for one packed forward; called once per layer, in order."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer, from 0.
            query: [1, Hq, T, D], after rotary embedding.
            key: [1, Hkv, T, D], after rotary embedding.
            value: [1, Hkv, T, D].
            scaling: factor of the scores.

        Returns:
            [1, T, Hq, D].
        """
        ...


@final
class PackedAttention:
    """Causal attention over sequences laid end to end: each attends only to itself. Differentiable."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the sequences' numbers of tokens, each at least 1; they add up to T."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs at least one token, got lengths {list(lengths)}")
        self._runs = tuple(_runs(lengths))
        self._tokens = sum(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`. Neighbours of equal length are computed as one batch."""
        if query.shape[2] != self._tokens:
            raise ValueError(f"the plan covers {self._tokens} tokens, the forward has {query.shape[2]}")
        parts: list[Tensor] = []
        for start, count, length in self._runs:
            queries, keys, values = (_unpack(tensor, start, count, length) for tensor in (query, key, value))
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
            parts.append(_repack(mixed))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, number of sequences, length of each) of every run of neighbours of equal length."""
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        yield start, count, length
        start += count * length


def _unpack(tensor: Tensor, start: int, count: int, length: int) -> Tensor:
    """[1, H, T, D] to [count, H, length, D]."""
    run = tensor[0, :, start : start + count * length]
    return run.unflatten(1, (count, length)).transpose(0, 1)


def _repack(batch: Tensor) -> Tensor:
    """[count, H, length, D] to [count * length, H, D]."""
    return batch.transpose(1, 2).flatten(0, 1)


def _attend_by_plan(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return kwargs["plan"].attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


AttentionInterface.register(ATTENTION_NAME, _attend_by_plan)
