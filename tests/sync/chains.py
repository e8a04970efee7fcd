"""Versions of a small model, as a chain sees them: some tensors move a little, some wholly, some not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom.config.sync import ChainConfig
from fathom.core.manifest import Manifest
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest, digest


def first(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(60, 40, generator=generator).bfloat16(),
        "head": torch.randn(40, 60, generator=generator).t(),
        "norm": torch.ones(40),
        "scale": torch.randn((), generator=generator),
        "codes": torch.randint(0, 255, (500,), generator=generator, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def moved(tensors: dict[str, Tensor], step: int, share: float = 0.02) -> dict[str, Tensor]:
    """The next version: every `share`-th element of the float tensors by a bit, some codes; the mask never."""
    generator = torch.Generator().manual_seed(1000 + step)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("embed", "head", "scale"):
        chosen = torch.rand(new[name].shape, generator=generator) < share
        new[name] = torch.where(chosen, new[name] * 1.01, new[name])
    new["codes"][step % 500] += 1
    return new


def versions(count: int, share: float = 0.02) -> list[dict[str, Tensor]]:
    tensors = [first()]
    for step in range(1, count):
        tensors.append(moved(tensors[-1], step, share))
    return tensors


def append_all(store: Store, tensors: list[dict[str, Tensor]], **config: int) -> list[Manifest]:
    writer, manifests = ChainWriter(store, ChainConfig(**config)), []
    for number, each in enumerate(tensors):
        manifests.append(build_manifest(number, 1, manifests[-1].version if manifests else None, each))
        writer.append(manifests[-1], each)
    return manifests


def blank(like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}


def holds(tensors: dict[str, Tensor], manifest: Manifest) -> bool:
    return digest(tensors) == manifest.version.digest
