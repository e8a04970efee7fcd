"""How each tensor of a version is best told to one who holds the version before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fathom.core.manifest import Manifest, TensorEntry
from fathom.sync.chain.codec import choose, count_changed, elements
from fathom.sync.chain.links import Encoding
from fathom.sync.digest import byte_view

_WHOLE_ABOVE = 0.9
"""Share of the bytes that would be told in full above which all of the version is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do with one tensor."""

    entry: TensorEntry
    """Which one."""
    encoding: Encoding
    """How it is told."""
    changed: int | None
    """Elements that differ. None: not compared."""


def whole(manifest: Manifest) -> list[Change]:
    """All of a version."""
    return [Change(entry=entry, encoding=Encoding.FULL, changed=None) for entry in manifest.tensors]


def changes(
    base: Manifest, memory: np.ndarray, manifest: Manifest, tensors: Mapping[str, Tensor]
) -> list[Change] | None:
    """From `base`, whose bytes are in `memory` (uint8, its layout), to the version in `tensors`.

    None: it is better told in full, because nearly all changed or its tensors are not of the same form.
    """
    if _forms(base) != _forms(manifest):
        return None
    found: list[Change] = []
    for before, entry in zip(base.tensors, manifest.tensors, strict=True):
        if before.checksum == entry.checksum:
            found.append(Change(entry=entry, encoding=Encoding.SAME, changed=0))
            continue
        old, new = placed(memory, entry), bits(entry, tensors)
        changed = count_changed(old, new)
        found.append(Change(entry=entry, encoding=choose(old, new, changed), changed=changed))
    return None if _is_whole(found) else found


def bits(entry: TensorEntry, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The elements of a tensor as unsigned integers [n]; its own memory, where that is contiguous on a CPU."""
    data = byte_view(tensors[entry.name].detach().cpu().contiguous()).numpy()
    return elements(data, _element_bytes(entry))


def placed(memory: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """The elements of a tensor as unsigned integers [n] where they lie in a version's flat layout (uint8)."""
    return elements(memory[entry.offset : entry.offset + entry.size_bytes], _element_bytes(entry))


def _is_whole(found: Sequence[Change]) -> bool:
    full = sum(change.entry.size_bytes for change in found if change.encoding is Encoding.FULL)
    return full > _WHOLE_ABOVE * sum(change.entry.size_bytes for change in found)


def _forms(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]


def _element_bytes(entry: TensorEntry) -> int:
    return entry.size_bytes // math.prod(entry.shape) if entry.size_bytes else 1
