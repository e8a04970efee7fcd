"""Rebuilds versions from a chain, to the bit, or says which object is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import TensorEntry
from fathom.sync.chain.codec import CodecError, Decoder, elements
from fathom.sync.chain.links import Link, LinkName, unseal
from fathom.sync.chain.reading import DataReader
from fathom.sync.chain.store import Store
from fathom.sync.digest import byte_view, checksum, copy_bytes, few
from fathom.sync.held import Held, check_fit

_NEVER = threading.Event()


@final
class ChainReader:
    """Reads a chain that someone else may be writing to, dropping from, or damaging. Not for two threads at once.

        reader = ChainReader(Store.open("runs/x/chain"))
        link = reader.find(7)
        reader.materialise(link.version, into, None)

    A link is applied only to the very version, to the digest, that it names as its parent; and every tensor is checked
    against the checksum of its complete new bytes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._links: dict[LinkName, tuple[str, Link]] = {}
        self._decoder = Decoder()
        self._fetched_bytes = 0

    def links(self) -> tuple[Link, ...]:
        """Every link that is whole now, oldest version first. A version may have two: its delta, then its anchor.

        Raises:
            PayloadError: the store cannot be read.
        """
        stamps = self._stamps()
        found = (self._try(name, stamps, []) for name in sorted(stamps))
        return tuple(link for link in found if link is not None)

    def newest(self) -> Link | None:
        """A link of the newest version. None: the chain is empty. Raises as `links`."""
        stamps = self._stamps()
        found = (self._try(name, stamps, []) for name in sorted(stamps, reverse=True))
        return next((link for link in found if link is not None), None)

    def find(self, number: int, incarnation: int | None = None) -> Link:
        """A link of a version; either kind has its manifest. No incarnation: the latest that has that number.

        Raises:
            PayloadError: it is not there, or damaged; the message says what is.
        """
        stamps = self._stamps()
        names = [name for name in sorted(stamps) if name.number == number and incarnation in (None, name.incarnation)]
        reasons: list[str] = []
        for name in reversed(names):
            link = self._try(name, stamps, reasons)
            if link is not None:
                return link
        wanted = f"v{number}" if incarnation is None else f"v{number}@{incarnation}"
        raise PayloadError(f"{wanted} is not in the chain {self._store.url}, {_listed(stamps, reasons)}")

    def path_to(self, version: PolicyVersion, held: PolicyVersion | None) -> tuple[Link, ...]:
        """The links to apply, in order: to `held` or from the nearest anchor, whatever is fewer bytes. Empty: held.

        Raises:
            PayloadError: nothing leads there.
        """
        if held == version:
            return ()
        reasons: list[str] = []
        stamps = self._stamps()
        best = min(self._paths(version, held, stamps, reasons, nearest=True), key=_cost, default=None)
        if best is None:
            raise self._refusal(version, stamps, reasons)
        return best

    def materialise(
        self,
        version: PolicyVersion,
        into: Mapping[str, Tensor],
        held: Held | None,
        given_up: threading.Event = _NEVER,
    ) -> int:
        """Overwrite `into` with a version, bit for bit; returns the bytes that were read for it.

        Starts from `held` or from an anchor, whatever is less to read. A tensor that comes out wrong is rebuilt by
        every other way there is.

        Args:
            version: which one.
            into: contiguous tensors on any device, of exactly the version's names and forms.
            held: a whole version in memory that is not `into`. None: there is none.
            given_up: return soon once it is set; `into` may then hold anything.

        Raises:
            PayloadError: it does not fit `into`, is not in the chain, or a tensor cannot be rebuilt; names the tensor
                and the object. `into` may hold anything.
        """
        self._fetched_bytes = 0
        links = self._quick(version, held)
        if links is None:
            links = self.path_to(version, held.version if held else None)
        target = links[-1] if links else self.find(version.number, version.incarnation)
        if target.version != version:
            raise PayloadError(f"{version.name} in the chain {self._store.url} is of another digest than what is held")
        check_fit(target.manifest, into)
        attempt = _Attempt(self._store, self._decoder, into, held, given_up)
        wrong = attempt.run(links, target.manifest.tensors)
        if wrong:
            wrong = self._rebuild(version, links, attempt, wrong)
        if wrong:
            raise PayloadError(
                f"{version.name} cannot be rebuilt from {self._store.url}: tensor {_first(wrong)}; wrong are "
                f"{few(list(wrong))}"
            )
        return self._fetched_bytes + attempt.read_bytes

    def _rebuild(
        self, version: PolicyVersion, tried: Sequence[Link], attempt: _Attempt, wrong: dict[str, str]
    ) -> dict[str, str]:
        """What is still wrong when every other path was tried for the tensors that were."""
        paths = sorted(self._paths(version, attempt.held_version, self._stamps(), [], nearest=False), key=_cost)
        for path in paths:
            if path == tuple(tried):
                continue
            entries = [entry for entry in path[-1].manifest.tensors if entry.name in wrong]
            found = attempt.run(path, entries)
            wrong = {name: f"{wrong[name]}; {reason}" for name, reason in found.items()}
            if not wrong:
                break
        return wrong

    def _quick(self, version: PolicyVersion, held: Held | None) -> tuple[Link, ...] | None:
        """The usual case, without a listing: one delta, from what is held. None: it is another case."""
        if held is None:
            return None
        if held.version == version:
            return ()
        name = LinkName.of(version, anchor=False)
        try:
            link = self._fetch(name)
        except PayloadError:
            return None
        return (link,) if link.version == version and link.parent == held.version else None

    def _paths(
        self,
        version: PolicyVersion,
        held: PolicyVersion | None,
        stamps: Mapping[LinkName, str],
        reasons: list[str],
        *,
        nearest: bool,
    ) -> Iterator[tuple[Link, ...]]:
        """The ways to `version`, the shortest first. What stands in the way is added to `reasons`.

        `nearest`: only one from an anchor, so that a long chain is not read to its beginning.
        """
        path: tuple[Link, ...] = ()
        best: int | None = None
        while True:
            anchor = self._try(LinkName.of(version, anchor=True), stamps, reasons, version)
            if anchor is not None and (best is None or not nearest):
                best = best or _cost((anchor, *path))
                yield (anchor, *path)
            behind = held is None or version.order <= held.order
            if nearest and best is not None and (behind or _cost(path) >= best):
                return
            delta = self._try(LinkName.of(version, anchor=False), stamps, reasons, version)
            if delta is None or delta.parent is None:
                if best is None:
                    reasons.append(f"nothing leads to {version.name}")
                return
            path = (delta, *path)
            if delta.parent == held:
                best = _cost(path) if best is None else min(best, _cost(path))
                yield path
            version = delta.parent

    def _fetch(self, name: LinkName) -> Link:
        content = self._store.get(name.link)
        self._fetched_bytes += len(content)
        return unseal(name, content)

    def _stamps(self) -> dict[LinkName, str]:
        found: dict[LinkName, str] = {}
        for object_name, stat in self._store.list("links").items():
            name = LinkName.parse(object_name)
            if name is not None:
                found[name] = f"{stat.stamp}-{stat.size_bytes}"
        self._links = {name: known for name, known in self._links.items() if name in found}
        return found

    def _try(
        self,
        name: LinkName,
        stamps: Mapping[LinkName, str],
        reasons: list[str],
        version: PolicyVersion | None = None,
    ) -> Link | None:
        """The link of that name. None: it is not listed, damaged or, where `version` is given, of another digest."""
        if name not in stamps:
            return None
        stamp, link = self._links.get(name, ("", None))
        if link is None or stamp != stamps[name]:
            try:
                link = self._fetch(name)
            except PayloadError as error:
                reasons.append(str(error))
                return None
            self._links[name] = (stamps[name], link)
        if version is not None and link.version != version:
            reasons.append(f"{name.link} is of another digest than {version.digest}")
            return None
        return link

    def _refusal(self, version: PolicyVersion, stamps: Mapping[LinkName, str], reasons: Sequence[str]) -> PayloadError:
        return PayloadError(f"{version.name} is not in the chain {self._store.url}, {_listed(stamps, reasons)}")


@final
class _Attempt:
    """Applies paths to tensors, one path after the other, and counts what was read."""

    def __init__(
        self,
        store: Store,
        decoder: Decoder,
        into: Mapping[str, Tensor],
        held: Held | None,
        given_up: threading.Event,
    ) -> None:
        self._store = store
        self._decoder = decoder
        self._into = into
        self._held = held
        self._given_up = given_up
        self.read_bytes = 0

    @property
    def held_version(self) -> PolicyVersion | None:
        return self._held.version if self._held else None

    def run(self, path: Sequence[Link], entries: Sequence[TensorEntry]) -> dict[str, str]:
        """Rebuild these tensors; returns those that came out wrong, each with its reason."""
        readers = [DataReader(self._store, link) for link in path]
        places = [{entry.name: place for place, entry in enumerate(link.manifest.tensors)} for link in path]
        wrong: dict[str, str] = {}
        for done, entry in enumerate(entries):
            if self._given_up.is_set():
                break
            pieces = [place.get(entry.name) for place in places]
            try:
                self._rebuild(entry, readers, pieces)
            except CodecError as error:
                wrong[entry.name] = f"{entry.name!r}: {error}"
            except PayloadError as error:  # the medium: it would fail for the others too, and may take long to
                wrong |= {each.name: f"{each.name!r}: {error}" for each in entries[done:]}
                break
        self.read_bytes += sum(reader.read_bytes for reader in readers)
        return wrong

    def _rebuild(self, entry: TensorEntry, readers: Sequence[DataReader], places: Sequence[int | None]) -> None:
        """Raises `CodecError` naming the object when the tensor comes out wrong."""
        into = self._into[entry.name]
        memory = into if into.device.type == "cpu" else torch.empty(entry.size_bytes, dtype=torch.uint8)
        if self._starts_from_held(readers):
            assert self._held is not None, "checked just before"
            copy_bytes(self._held.tensors[entry.name].detach().contiguous(), memory)
        bits = elements(byte_view(memory).numpy(), into.element_size())
        for reader, place in zip(readers, places, strict=True):
            name = reader.link.name.data
            if place is None:
                raise CodecError(f"it is not in {name}")
            piece = reader.link.pieces[place]
            reader.open(piece)
            try:
                self._decoder.apply(piece.encoding, reader, bits)
                reader.require_end()
            except CodecError as error:
                raise CodecError(f"{name} is damaged: {error}") from error
        if memory is not into:
            copy_bytes(memory, into)
        if checksum(into) != entry.checksum:
            objects = [reader.link.name.data for reader in readers] or ["what was held"]
            raise CodecError(f"its checksum is wrong after {', '.join(objects)}")

    def _starts_from_held(self, readers: Sequence[DataReader]) -> bool:
        return not readers or readers[0].link.parent is not None


def _cost(path: Sequence[Link]) -> int:
    return sum(link.size_bytes for link in path)


def _first(wrong: Mapping[str, str]) -> str:
    return next(iter(wrong.values()))


def _listed(stamps: Mapping[LinkName, str], reasons: Sequence[str]) -> str:
    names = sorted({(name.incarnation, name.number) for name in stamps})
    if not names:
        return "which is empty"
    (first, last) = (f"v{number}@{incarnation}" for incarnation, number in (names[0], names[-1]))
    found = f"which holds {first} to {last}" if first != last else f"which holds {first} only"
    return found + (f" ({'; '.join(reasons)})" if reasons else "")
