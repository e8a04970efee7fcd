"""Appends versions to a chain: what changed since the last one, and now and then all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import final

import numpy as np
from torch import Tensor

from fathom.config.sync import ChainConfig
from fathom.core.errors import BudgetError, DeliveryError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.sync.chain.changes import Change, bits, changes, placed, whole
from fathom.sync.chain.codec import BLOCK_ELEMENTS, Encoder
from fathom.sync.chain.leases import leased
from fathom.sync.chain.links import Encoding, Link, LinkName, Piece, seal
from fathom.sync.chain.retention import Retention
from fathom.sync.chain.store import Store

Trouble = Callable[[Exception], None]
"""Told, in whichever thread, what is wrong with a chain while its run goes on."""

_MB = 1 << 20


def unheard(error: Exception) -> None:
    """Nobody is told."""


@final
class ChainWriter:
    """The one writer of a chain. Keeps the bytes of the last version in memory to compare the next with.

    A version that was appended is whole and durable: its link is written last. What an earlier writer left half-done
    is removed at the start; its versions stay, and the first append is an anchor. One call at a time.
    """

    def __init__(self, store: Store, config: ChainConfig, trouble: Trouble = unheard) -> None:
        """Tidy up and begin. `trouble` hears, once, that the budget does not hold what must be kept.

        Raises:
            DeliveryError | PayloadError: the store cannot be reached.
        """
        self._store = store
        self._config = config
        self._retention = Retention(budget_bytes=config.budget_mb * _MB, keep_steps=config.keep_steps)
        self._trouble = trouble
        self._warned = False
        self._encoder = Encoder(config.level)
        self._memory = np.empty(0, np.uint8)
        self._base: Manifest | None = None
        self._newest: PolicyVersion | None = None
        self._since_anchor = 0
        store.sweep()
        self._sizes = _tidied(store)

    @property
    def url(self) -> str:
        """Where the chain lies."""
        return self._store.url

    @property
    def newest(self) -> PolicyVersion | None:
        """The version appended last by this writer. None: none yet, or it was no good."""
        return self._newest

    def append(self, manifest: Manifest, tensors: Mapping[str, Tensor], needed: Collection[PolicyVersion] = ()) -> None:
        """Add the version that follows those before; returns once it is durable. The newest itself: nothing is done.

        `needed` are versions that somebody holds or reads: what leads from them to the newest is kept.

        Raises:
            DeliveryError | PayloadError: the medium failed. Unless only old versions could not be dropped, the version
                is not in the chain, and the next append is an anchor.
        """
        self.extend(manifest, tensors)
        self.settle(needed)

    def extend(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """The part of `append` that readers wait for: afterwards the version can be read. Raises as `append`."""
        if manifest.version == self._newest:
            return
        base, self._base = self._base, None  # until it is whole again
        for anchor in (False, True):  # one of the same name failed, or its numbers would not have begun again
            name = LinkName.of(manifest.version, anchor=anchor)
            if name in self._sizes:
                self._remove(name)
                base = None
        if base is None or not self._append_delta(base, manifest, tensors):
            self._append_anchor(manifest, tensors)
        self._base, self._newest = manifest, manifest.version

    def settle(self, needed: Collection[PolicyVersion] = ()) -> None:
        """The rest of `append`: an anchor, where one is due; and what is over the budget is dropped. Raises as it."""
        if self._base is not None and self._since_anchor >= self._config.anchor_every:
            self._append_anchor(self._base, None)
        if self._projected_bytes() <= self._retention.budget_bytes:
            return
        pinned = [LinkName.of(version, anchor=False) for version in needed] + leased(self._store, time.time())
        if self._base is not None and self._retention.wants_anchor(self._sizes, pinned, self._since_anchor):
            self._append_anchor(self._base, None)
        for name in self._retention.droppable(self._sizes, pinned):
            self._remove(name)
        self._warn_over_budget()

    def restart(self) -> None:
        """The newest version was no good to its readers: what comes next, itself included, is an anchor."""
        self._base = self._newest = None

    def _append_delta(self, base: Manifest, manifest: Manifest, tensors: Mapping[str, Tensor]) -> bool:
        """False: an anchor is smaller, or the only way."""
        found = changes(base, self._memory, manifest, tensors)
        if found is None:
            return False
        link = self._write(manifest, base.version, found, tensors)
        if link.size_bytes >= manifest.size_bytes:  # many tiny tensors, for instance
            self._remove(link.name)
            return False
        self._since_anchor += 1
        return True

    def _append_anchor(self, manifest: Manifest, tensors: Mapping[str, Tensor] | None) -> None:
        """All of a version. None: it is in the memory."""
        last = manifest.tensors[-1]
        if len(self._memory) != last.offset + last.size_bytes:
            self._memory = np.empty(last.offset + last.size_bytes, np.uint8)
        self._write(manifest, None, whole(manifest), tensors)
        self._since_anchor = 0

    def _write(
        self,
        manifest: Manifest,
        parent: PolicyVersion | None,
        found: Sequence[Change],
        tensors: Mapping[str, Tensor] | None,
    ) -> Link:
        """Data, then link. `tensors` go into the memory on the way. None: they are there."""
        name = LinkName.of(manifest.version, anchor=parent is None)
        pieces: list[Piece] = []
        try:
            self._store.put(name.data, self._chunks(found, tensors, pieces))
            link = Link(version=manifest.version, parent=parent, manifest=manifest, pieces=tuple(pieces))
            sealed = seal(link)
            self._store.put(name.link, [sealed])
        except DeliveryError:
            with suppress(DeliveryError):  # the medium is full or gone; a writer that opens it looks again
                self._remove(name)
            raise
        self._sizes[name] = link.size_bytes + len(sealed)
        return link

    def _chunks(
        self, found: Sequence[Change], tensors: Mapping[str, Tensor] | None, pieces: list[Piece]
    ) -> Iterator[bytes]:
        """The data object. Notes the pieces, and leaves the new bytes in the memory."""
        offset = 0
        for change in found:
            old, size_bytes = placed(self._memory, change.entry), 0
            new = old if tensors is None else bits(change.entry, tensors)
            if change.encoding is not Encoding.SAME:
                for start in range(0, len(new), BLOCK_ELEMENTS):
                    before, after = old[start : start + BLOCK_ELEMENTS], new[start : start + BLOCK_ELEMENTS]
                    for chunk in self._encoder.encode(change.encoding, before, after):
                        size_bytes += len(chunk)
                        yield chunk
                    if tensors is not None:
                        before[:] = after
            pieces.append(Piece(encoding=change.encoding, offset=offset, size_bytes=size_bytes, changed=change.changed))
            offset += size_bytes

    def _projected_bytes(self) -> int:
        """What it may come to before there is another chance to drop."""
        return self._retention.enough_bytes(self._sizes)

    def _warn_over_budget(self) -> None:
        taken = sum(self._sizes.values())
        if taken <= self._retention.budget_bytes or self._warned:
            return
        self._warned = True
        enough_mb = -(-self._retention.enough_bytes(self._sizes) // _MB)
        self._trouble(
            BudgetError(
                f"the chain of versions takes {taken / _MB:.1f} MB, and sync.chain.budget_mb = "
                f"{self._config.budget_mb}; what is needed is kept all the same; {enough_mb} MB would do"
            )
        )

    def _remove(self, name: LinkName) -> None:
        self._sizes.pop(name, None)
        self._store.delete(name.link)
        self._store.delete(name.data)


def _tidied(store: Store) -> dict[LinkName, int]:
    """Bytes of every link with its data. Data whose link was never written, or was removed first, is removed."""
    links, data = store.list("links"), dict(store.list("data"))
    sizes: dict[LinkName, int] = {}
    for found, stat in links.items():
        name = LinkName.parse(found)
        if name is not None:
            held = data.pop(name.data, None)
            sizes[name] = stat.size_bytes + (held.size_bytes if held else 0)
    for leftover in data:
        store.delete(leftover)
    return sizes
