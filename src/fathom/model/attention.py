"""The one attention function of every forward. What a token attends to is decided by a plan, not by a mask.

Letters: T tokens of a packed forward (batch dimension 1), Hq query heads, Hkv key/value heads, D head size. A forward
may carry padding after its plan's tokens: nothing attends to it and its output is zero.

`transformers` hands its keyword arguments down to the attention function, so the plan travels beside the input ids and
the model definitions stay untouched. No mask function is registered: `transformers` then builds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from fathom.model.kernels.cpu_attention import PAGE_TOKENS
from fathom.model.kernels.tiled_attention import TiledAttention, computes, page_shapes

ATTENTION_NAME = "fathom"
"""The name under which `transformers` finds the function."""


class AttentionPlan(Protocol):
    """Computes attention for one packed forward; called once per layer, in order."""

    @property
    def tokens(self) -> int:
        """T; a forward may carry padding after them."""
        ...

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
    """Causal attention over sequences laid end to end: each attends only to itself. Differentiable.

    On CPUs the forward is the engine's own kernel, so a row's bits are the engine's; its gradient is computed by
    torch's attention, of which it is the same function.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the sequences' numbers of tokens, each at least 1; they add up to T."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs at least one token, got lengths {list(lengths)}")
        self._runs = tuple(_runs(lengths))
        self.tokens = sum(lengths)
        self._lengths = np.array(lengths)
        self._tiled: tuple[TiledAttention, Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        if computes(query.dtype, query.device, value.shape[3]):
            return _KernelForward.apply(query, key, value, scaling, self)
        return self.by_torch(query, key, value, scaling)

    def by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Without gradients, by the CPU kernel, over pages that live as long as this plan."""
        if self._tiled is None:
            counts = -(-self._lengths // PAGE_TOKENS)
            tables = (np.cumsum(counts) - counts)[:, None] + np.arange(counts.max())
            shapes = page_shapes(int(counts.sum()), key.shape[1], key.shape[3], value.shape[3])
            tiled = TiledAttention(tables, np.zeros_like(self._lengths), self._lengths)
            memory = [torch.empty(shape, dtype=query.dtype) for shape in shapes]
            self._tiled = (tiled, memory[0], memory[1])
        tiled, keys, values = self._tiled
        return tiled.attend(query, key, value, scaling, keys, values)

    def by_torch(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """By torch. Neighbours of equal length are computed as one batch; tokens that the plan lacks are zero."""
        parts: list[Tensor] = []
        for start, count, length in self._runs:
            queries, keys, values = (_unpack(tensor, start, count, length) for tensor in (query, key, value))
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
            parts.append(_repack(mixed))
        if padding := query.shape[2] - self.tokens:
            parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


@final
class _KernelForward(torch.autograd.Function):
    """The kernel's forward with torch's gradient; nothing but its arguments is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: PackedAttention) -> Tensor:
        """The kernel's output."""
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.plan = scaling, plan
        return plan.by_kernel(query, key, value, scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value."""
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.plan.by_torch(*inputs, ctx.scaling)
        return (*torch.autograd.grad(out, inputs, grads[0]), None, None)


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
