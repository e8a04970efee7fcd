"""Appends versions to a chain: what changed since the last one, and now and then all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from fathom.config.sync import ChainConfig
from fathom.core.errors import DeliveryError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry
from fathom.sync.chain.codec import BLOCK_ELEMENTS, Encoder, choose, count_changed, elements
from fathom.sync.chain.links import Encoding, Link, LinkName, Piece, seal
from fathom.sync.chain.store import Store
from fathom.sync.digest import byte_view

_WHOLE_ABOVE = 0.9
"""Share of the bytes that a delta would hold in full above which it is an anchor instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to do with one tensor."""

    entry: TensorEntry
    encoding: Encoding
    changed: int | None


@final
class ChainWriter:
    """The one writer of a chain. Keeps the bytes of the last version in memory to compare the next with.

    A version that was appended is whole and durable: its link is written last. What an earlier writer left half-done
    is removed at the start; its versions stay, and the first append is an anchor. One call at a time.
    """

    def __init__(self, store: Store, config: ChainConfig) -> None:
        """Tidy up and begin.

        Raises:
            DeliveryError | PayloadError: the store cannot be reached.
        """
        self._store = store
        self._config = config
        self._encoder = Encoder(config.level)
        self._memory = np.empty(0, np.uint8)
        self._base: Manifest | None = None
        self._newest: PolicyVersion | None = None
        self._since_anchor = 0
        store.sweep()
        _remove_unlinked(store)

    @property
    def newest(self) -> PolicyVersion | None:
        """The version appended last by this writer. None: none yet."""
        return self._newest

    def append(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Add a version that follows those before; returns once it is durable. One that is the newest already: nothing.

        Raises:
            DeliveryError: the medium failed. The version is not in the chain; the next append is an anchor.
        """
        self.extend(manifest, tensors)
        self.settle()

    def extend(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """The part of `append` that readers wait for: the version can be read."""
        if manifest.version == self._newest:
            return
        base, self._base = self._base, None  # until it is whole again
        if base is not None and base.version.name == manifest.version.name:
            base = None
        self._remove_namesakes(manifest.version)
        if base is None or not self._append_delta(base, manifest, tensors):
            self._write(manifest, None, _whole(manifest), tensors)
            self._since_anchor = 0
        self._base, self._newest = manifest, manifest.version

    def settle(self) -> None:
        """The rest of `append`: the anchor, where one is due. Raises as `append`; what was extended stays."""
        if self._base is not None and self._since_anchor >= self._config.anchor_every:
            self._write(self._base, None, _whole(self._base), None)
            self._since_anchor = 0

    def restart(self) -> None:
        """Compare the next version with nothing: it is an anchor, for readers to whom the last one was no good."""
        self._base = self._newest = None

    def _append_delta(self, base: Manifest, manifest: Manifest, tensors: Mapping[str, Tensor]) -> bool:
        """False: an anchor is smaller, or the only way."""
        if not _same_form(base, manifest):
            return False
        plans = _plans(base, manifest, tensors, self._memory)
        if _is_whole(plans):
            return False
        link = self._write(manifest, base.version, plans, tensors)
        if link.size_bytes >= manifest.size_bytes:  # many tiny tensors, for instance
            self._remove(link.name)
            return False
        self._since_anchor += 1
        return True

    def _write(
        self,
        manifest: Manifest,
        parent: PolicyVersion | None,
        plans: Sequence[_Plan],
        tensors: Mapping[str, Tensor] | None,
    ) -> Link:
        """Data, then link. `tensors` go into the memory on the way. None: they are there."""
        name = LinkName.of(manifest.version, anchor=parent is None)
        pieces: list[Piece] = []
        if tensors is not None:
            self._make_room(manifest)
        try:
            self._store.put(name.data, self._chunks(plans, tensors, pieces))
            link = Link(version=manifest.version, parent=parent, manifest=manifest, pieces=tuple(pieces))
            self._store.put(name.link, [seal(link)])
            return link
        except DeliveryError:
            with suppress(DeliveryError):  # the medium is full or gone; an opening writer looks again
                self._remove(name)
            raise

    def _chunks(
        self, plans: Sequence[_Plan], tensors: Mapping[str, Tensor] | None, pieces: list[Piece]
    ) -> Iterator[bytes]:
        """The data object. Notes the pieces, and leaves the new bytes in the memory."""
        offset = 0
        for plan in plans:
            old, size_bytes = self._place(plan.entry), 0
            new = old if tensors is None else _bits(plan.entry, tensors)
            if plan.encoding is not Encoding.SAME:
                for start in range(0, len(new), BLOCK_ELEMENTS):
                    before, after = old[start : start + BLOCK_ELEMENTS], new[start : start + BLOCK_ELEMENTS]
                    for chunk in self._encoder.encode(plan.encoding, before, after):
                        size_bytes += len(chunk)
                        yield chunk
                    if tensors is not None:
                        before[:] = after
            pieces.append(Piece(encoding=plan.encoding, offset=offset, size_bytes=size_bytes, changed=plan.changed))
            offset += size_bytes

    def _make_room(self, manifest: Manifest) -> None:
        last = manifest.tensors[-1]
        if len(self._memory) != last.offset + last.size_bytes:
            self._memory = np.empty(last.offset + last.size_bytes, np.uint8)

    def _place(self, entry: TensorEntry) -> np.ndarray:
        return _placed(self._memory, entry)

    def _remove_namesakes(self, version: PolicyVersion) -> None:
        """Another version of that name can only be one that failed: nothing follows it."""
        for anchor in (True, False):
            self._remove(LinkName.of(version, anchor=anchor))

    def _remove(self, name: LinkName) -> None:
        self._store.delete(name.link)
        self._store.delete(name.data)


def _whole(manifest: Manifest) -> list[_Plan]:
    return [_Plan(entry=entry, encoding=Encoding.FULL, changed=None) for entry in manifest.tensors]


def _plans(base: Manifest, manifest: Manifest, tensors: Mapping[str, Tensor], memory: np.ndarray) -> list[_Plan]:
    """How each tensor is best told to one who holds `base`, whose bytes are in `memory`; of the same form."""
    plans: list[_Plan] = []
    for before, entry in zip(base.tensors, manifest.tensors, strict=True):
        if before.checksum == entry.checksum:
            plans.append(_Plan(entry=entry, encoding=Encoding.SAME, changed=0))
            continue
        old, new = _placed(memory, entry), _bits(entry, tensors)
        changed = count_changed(old, new)
        plans.append(_Plan(entry=entry, encoding=choose(old, new, changed), changed=changed))
    return plans


def _is_whole(plans: Sequence[_Plan]) -> bool:
    full = sum(plan.entry.size_bytes for plan in plans if plan.encoding is Encoding.FULL)
    return full > _WHOLE_ABOVE * sum(plan.entry.size_bytes for plan in plans)


def _same_form(one: Manifest, other: Manifest) -> bool:
    forms = [[(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors] for manifest in (one, other)]
    return forms[0] == forms[1]


def _bits(entry: TensorEntry, tensors: Mapping[str, Tensor]) -> np.ndarray:
    data = byte_view(tensors[entry.name].detach().cpu().contiguous()).numpy()
    return elements(data, _element_bytes(entry))


def _placed(memory: np.ndarray, entry: TensorEntry) -> np.ndarray:
    return elements(memory[entry.offset : entry.offset + entry.size_bytes], _element_bytes(entry))


def _element_bytes(entry: TensorEntry) -> int:
    return entry.size_bytes // math.prod(entry.shape) if entry.size_bytes else 1


def _remove_unlinked(store: Store) -> None:
    """Data whose link was never written, or was removed first."""
    linked = {name.data for found in store.list("links") if (name := LinkName.parse(found)) is not None}
    for found in store.list("data"):
        if found not in linked:
            store.delete(found)
