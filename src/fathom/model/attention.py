"""The one attention function of every forward. What a token attends to is decided by a plan, not by a mask.

Letters: T tokens of a packed forward (batch dimension 1), Hq query heads, Hkv key/value heads, D head size. A forward
may carry padding after its plan's tokens: nothing attends to it and its output is zero.

`transformers` hands its keyword arguments down to the attention function, so the plan travels beside the input ids and
the model definitions stay untouched. No mask function is registered: `transformers` then builds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
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
    """Causal attention over sequences laid end to end: each attends only to itself, and to what it comes after.

    On CPUs the forward is the engine's own kernel, so a row's bits are the engine's; its gradient is computed by
    torch's attention, of which it is the same function. Differentiable.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """A plan.

        Args:
            lengths: the sequences' numbers of tokens, each at least 1; they add up to T.
            parents: index of the sequence that each comes right after, as if both were one; always an earlier one,
                whole pages long. -1: after none. None: so do all.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every packed sequence needs at least one token, got lengths {list(lengths)}")
        self._chains = _chains(lengths, parents if parents is not None else [-1] * len(lengths))
        self._runs = tuple(_runs(lengths, self._chains))
        self._places = {run.first + i: (number, i) for number, run in enumerate(self._runs) for i in range(run.count)}
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
            shapes = page_shapes(int(counts.sum()), key.shape[1], key.shape[3], value.shape[3])
            starts = np.array([sum(self._lengths[list(chain)]) for chain in self._chains])
            tiled = TiledAttention(self._tables(counts), starts, self._lengths)
            memory = [torch.empty(shape, dtype=query.dtype) for shape in shapes]
            self._tiled = (tiled, memory[0], memory[1])
        tiled, keys, values = self._tiled
        return tiled.attend(query, key, value, scaling, keys, values)

    def by_torch(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """By torch. Neighbours of equal length are computed as one batch; tokens that the plan lacks are zero."""
        padding = query.shape[2] - self.tokens
        sizes = [run.count * run.length for run in self._runs] + ([padding] if padding else [])
        queries, keys, values = (
            [_unpack(part, run) for part, run in zip(tensor.squeeze(0).split(sizes, dim=1), self._runs, strict=False)]
            for tensor in (query, key, value)
        )
        parts: list[Tensor] = []
        for number, run in enumerate(self._runs):
            known, told = keys[number], values[number]
            if run.chain:
                known, told = self._after(run, keys, known), self._after(run, values, told)
            parts.append(_repack(_causal(queries[number], known, told, scaling)))
        if padding:
            parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _after(self, run: _Run, batches: Sequence[Tensor], own: Tensor) -> Tensor:
        """[count, H, P + length, D]: `own` after the P tokens of the run's chain, which lie in `batches`."""
        before = [batches[number][place] for number, place in (self._places[sequence] for sequence in run.chain)]
        return torch.cat((torch.cat(before, dim=1).expand(run.count, -1, -1, -1), own), dim=2)

    def _tables(self, counts: np.ndarray) -> np.ndarray:
        """int64 [B, P]: pages of each sequence, those of its chain first; every sequence has `counts` of its own."""
        ends = np.cumsum(counts)
        own = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        pages = [np.concatenate([own[each] for each in (*chain, i)]) for i, chain in enumerate(self._chains)]
        tables = np.zeros((len(pages), max(map(len, pages))), np.int64)
        for table, row in zip(tables, pages, strict=True):
            table[: len(row)] = row
        return tables


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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Neighbours of equal length that come after the same sequence."""

    first: int
    """Index of the first one."""
    count: int
    """How many there are."""
    length: int
    """Tokens of each."""
    chain: tuple[int, ...]
    """What they come after: indices of sequences, from the beginning."""


def _chains(lengths: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """What each sequence comes after: indices of sequences, from the beginning."""
    chains: list[tuple[int, ...]] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index or (parent >= 0 and lengths[parent] % PAGE_TOKENS):
            raise ValueError(
                f"sequence {index} cannot come after {parent}: that must be an earlier one of whole pages of "
                f"{PAGE_TOKENS} tokens"
            )
        chains.append((*chains[parent], parent) if parent >= 0 else ())
    return tuple(chains)


def _runs(lengths: Sequence[int], chains: Sequence[tuple[int, ...]]) -> Iterator[_Run]:
    first = 0
    for (length, chain), run in groupby(zip(lengths, chains, strict=True)):
        count = len(list(run))
        yield _Run(first=first, count=count, length=length, chain=chain)
        first += count


def _unpack(part: Tensor, run: _Run) -> Tensor:
    """[H, count * length, D] to [count, H, length, D]."""
    return part.unflatten(1, (run.count, run.length)).transpose(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of queries [count, H, L, D] that are the last L of the P + L tokens that keys and values are of.

    Without a mask torch knows only P = 0: more queries in front make it so, and cost less where P is small.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    if length < before:
        mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(before)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    query = pad(query, (0, 0, before, 0)) if before else query
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed[:, :, before:] if before else mixed


def _repack(batch: Tensor) -> Tensor:
    """[count, H, length, D] to [count * length, H, D]."""
    return batch.transpose(1, 2).flatten(0, 1)


def _attend_by_plan(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return kwargs["plan"].attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


AttentionInterface.register(ATTENTION_NAME, _attend_by_plan)
