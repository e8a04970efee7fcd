"""What a chain's objects are called, and the record that describes one version in it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec
import zstandard
from blake3 import blake3

from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.sync.digest import root_digest

_SEAL_BYTES = 32
_LEVEL = 3
_LINK_NAME = re.compile(r"links/v(\d+)@(\d+)\.(anchor|delta)\.msgpack")


class Encoding(StrEnum):
    """How the bytes of one tensor lie in a link."""

    SAME = "same"
    """Nothing: they are those of the parent."""
    INDEX = "index"
    """Positions of the elements that changed, as gaps, and by how much each did."""
    XOR = "xor"
    """New bytes against those of the parent. Applied twice it would undo itself."""
    FULL = "full"
    """The bytes themselves, whatever the parent."""


class Piece(msgspec.Struct, frozen=True, tag="piece.1"):
    """One tensor in a link's data object."""

    encoding: Encoding
    """How to read it."""
    offset: int
    """First byte in the data object."""
    size_bytes: int
    """Bytes there; 0 for `same`."""
    changed: int | None
    """Elements that differ from the parent's. None: not compared (`full`)."""


class Link(msgspec.Struct, frozen=True, tag="link.1"):
    """One version in the chain: an anchor holds all of it, a delta what changed since its parent."""

    version: PolicyVersion
    """The version."""
    parent: PolicyVersion | None
    """What it must be applied to, to the digest. None: it is an anchor."""
    manifest: Manifest
    """The version's own manifest, as it was published: checksums of the complete new tensors."""
    pieces: tuple[Piece, ...]
    """One per tensor, in the manifest's order."""

    @property
    def name(self) -> LinkName:
        """What its objects are called."""
        return LinkName.of(self.version, anchor=self.parent is None)

    @property
    def size_bytes(self) -> int:
        """Bytes of its data object."""
        return sum(piece.size_bytes for piece in self.pieces)


class LinkName(NamedTuple):
    """Which version, and whether its anchor or its delta. Sorted as the chain goes; a version may have both."""

    incarnation: int
    """Incarnation of the run."""
    number: int
    """Number of the version."""
    anchor: bool
    """True: the anchor. False: the delta."""

    @classmethod
    def of(cls, version: PolicyVersion, *, anchor: bool) -> Self:
        """The objects of `version`."""
        return cls(version.incarnation, version.number, anchor)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """From the name of a link object. None: it is none."""
        found = _LINK_NAME.fullmatch(name)
        return cls(int(found[2]), int(found[1]), found[3] == "anchor") if found else None

    @property
    def link(self) -> str:
        """The link object. Written last: while it is there, the data is there, whole."""
        return f"links/{self._stem}.msgpack"

    @property
    def data(self) -> str:
        """The data object."""
        return f"data/{self._stem}.bin"

    @property
    def _stem(self) -> str:
        return f"v{self.number}@{self.incarnation}.{'anchor' if self.anchor else 'delta'}"


def seal(link: Link) -> bytes:
    """A link object: BLAKE3 of the rest, then the record, as zstd."""
    record = zstandard.compress(msgspec.msgpack.encode(link), _LEVEL)
    return blake3(record).digest() + record


def unseal(name: LinkName, content: bytes) -> Link:
    """Read a link object. Raises `PayloadError` naming it when a byte of it is wrong, or it is another one."""
    record = content[_SEAL_BYTES:]
    if blake3(record).digest() != content[:_SEAL_BYTES]:
        raise PayloadError(f"{name.link} is damaged: its checksum is wrong")
    try:
        link = msgspec.msgpack.decode(zstandard.decompress(record), type=Link)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise PayloadError(f"{name.link} is no link that this version of Fathom reads: {error}") from error
    entries = link.manifest.tensors
    if (
        link.name != name
        or link.manifest.version != link.version
        or root_digest(entries) != link.version.digest
        or len(link.pieces) != len(entries)
    ):
        raise PayloadError(f"{name.link} contradicts itself; its version must be published again")
    return link
