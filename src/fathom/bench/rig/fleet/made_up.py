"""Weights of any size: shaped like a transformer's, with bytes made from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fathom.bench.rig.fleet.messages import TensorForm
from fathom.sync.digest import dtype_name
from fathom.sync.shards import Box

_ELEMENT_BYTES = 2
_LAYERS = 30
_SCALE = 0.02
_BLOCK = 1 << 22
"""Elements drawn, and used over and over: drawing gigabytes takes longer than sending them."""
_STRIDE = 1_000_003
_SECOND = ("o", "down")
"""Matrices that end a block."""


def made_up_weights(size_bytes: int, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 tensors of about `size_bytes` together: an embedding of a fifth of them, and 30 layers of nine tensors.

    Values are normal with a deviation of 0.02, as trained weights are: compression sees what it would see there.
    """
    hidden = max(8, int((0.8 * size_bytes / _ELEMENT_BYTES / _LAYERS / 11.2) ** 0.5) // 8 * 8)
    rows = max(1, int(0.2 * size_bytes / _ELEMENT_BYTES) // hidden)
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed)) * _SCALE).to(torch.bfloat16)
    twice = torch.cat((block, block))
    return {name: _cut(twice, shape, index * _STRIDE) for index, (name, shape) in enumerate(_shapes(hidden, rows))}


def change(weights: Mapping[str, Tensor], share: float, seed: int) -> None:
    """Flip the last bit of about `share` of the elements, at random places: what a small optimizer step leaves."""
    generator = np.random.default_rng(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1).numpy()
        places = generator.integers(0, bits.size, max(1, int(share * bits.size)))
        bits[places] ^= 1


def forms_of(weights: Mapping[str, Tensor]) -> list[TensorForm]:
    """What they are, without their bytes."""
    return [
        TensorForm(name=name, dtype=dtype_name(name, tensor), shape=tuple(tensor.shape))
        for name, tensor in weights.items()
    ]


def tensor_parallel(forms: Sequence[TensorForm], shards: int) -> list[dict[str, Box]]:
    """By rank: matrices cut along their first dimension, or, where they end a block, along their second; vectors whole.

    So each rank holds 1 / `shards` of the bytes, and the vectors.
    """
    return [{form.name: _slice_of(form, rank, shards) for form in forms} for rank in range(shards)]


def _slice_of(form: TensorForm, rank: int, shards: int) -> Box:
    bounds = [(0, size) for size in form.shape]
    if len(bounds) > 1:
        cut = int(any(f".{name}." in form.name for name in _SECOND))
        size = form.shape[cut]
        bounds[cut] = (size * rank // shards, size * (rank + 1) // shards)
    return Box(tuple(bounds))


def _shapes(hidden: int, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """About 11.2 * hidden^2 elements a layer."""
    yield "embed.weight", (rows, hidden)
    inner = int(8 / 3 * hidden)
    for layer in range(_LAYERS):
        for name, shape in {
            "q": (hidden, hidden),
            "k": (int(0.6 * hidden), hidden),
            "v": (int(0.6 * hidden), hidden),
            "o": (hidden, hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "norm1": (hidden,),
            "norm2": (hidden,),
        }.items():
            yield f"layers.{layer}.{name}.weight", shape


def _cut(twice: Tensor, shape: tuple[int, ...], start: int) -> Tensor:
    """From a block that is there two times, one after the other."""
    size, block = int(np.prod(shape)), twice.numel() // 2
    begin = start % block
    if size <= block:
        return twice[begin : begin + size].view(shape).clone()
    return twice[begin : begin + block].repeat(-(-size // block))[:size].view(shape).clone()
