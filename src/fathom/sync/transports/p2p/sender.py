"""A source rank: holds its slices of a version, and writes what receiving ranks ask for."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from fathom.core.errors import ConfigError, DeliveryError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, PeerRank, PeerShard
from fathom.sync.transports.p2p.fabrics.fabric import Fabric, FabricError, Stop, Write
from fathom.sync.transports.p2p.held import HeldSlice, HeldVersions, Slice, registered_memory
from fathom.sync.transports.p2p.line import Line, LineError
from fathom.sync.transports.p2p.messages import Ask, Done, Failed, FailureKind, Hello, Place
from fathom.sync.transports.p2p.plan import PIECE_BYTES

_HELLO_S, _HELLO_BYTES = 10.0, 1 << 10
_ASK_BYTES = 256 << 20
_ACCEPT_S = 0.2
_BACKLOG = 128


@dataclass(slots=True, kw_only=True, eq=False)
class _Offer:
    """What may be asked for now."""

    version: PolicyVersion
    engines: frozenset[EngineId]
    token: str = field(default_factory=secrets.token_urlsafe)
    over: threading.Event = field(default_factory=threading.Event)
    """Set when it may be asked for no longer; what is being written ends."""
    writers: set[threading.Thread] = field(default_factory=set)
    """Threads that write because of it."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """A receiving rank, as the fabric knows it."""

    description: bytes
    name: str


class _UndeliveredError(Exception):
    """The fabric failed while it wrote some of these tensors."""

    def __init__(self, reason: str, suspects: Sequence[str]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suspects = tuple(suspects)


@dataclass(frozen=True, slots=True)
class _Part:
    """A write, and the tensor that it belongs to."""

    name: str
    write: Write


@final
class Sender:
    """One source rank, with memory, a control socket and a thread for each receiving rank that asks.

    A sharded trainer has one in each of its processes; the holdings of all of them go into one `PeerSource`.
    """

    def __init__(self, fabric: Fabric, host: str, port: int, timeout_s: float) -> None:
        """Listen at `host`; port 0 is any free one. A receiving rank is served for `timeout_s` at most.

        Raises:
            ConfigError: it cannot listen there.
        """
        self._fabric = fabric
        self._host = host
        self._timeout_s = timeout_s
        self._held = HeldVersions(fabric)
        self._offer: _Offer | None = None
        self._peers: dict[tuple[EngineId, int], _Peer] = {}
        self._spare: list[Tensor] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"sync.p2p.host = {host!r}, sync.p2p.port = {port}: nothing can listen there ({error}); name a "
                "free port and an address of this machine"
            ) from error
        self._accepting = threading.Thread(target=self._accept, name="p2p-accept", daemon=True)
        self._accepting.start()

    def hold(self, manifest: Manifest, slices: Mapping[str, Slice]) -> None:
        """Copy this rank's slices of a version. Raises as `HeldVersions.hold` does."""
        self._held.hold(manifest, slices)

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId], *, whole: bool) -> PeerRank:
        """Begin to serve these engines; an earlier offer is over, and nothing is written any more because of it.

        `whole`: this rank holds every tensor whole, so that its slices need not be listed.

        Raises:
            DeliveryError: the version is not held, or an earlier write does not end.
        """
        slices = self._held.find(version)
        self._end_offer()
        offer = _Offer(version=version, engines=frozenset(engines))
        with self._lock:
            gone = [key for key in self._peers if key[0] not in offer.engines]
            forgotten = [self._peers.pop(key).name for key in gone]
            self._offer = offer
        for name in forgotten:
            self._fabric.forget(name)
        return PeerRank(
            host=self._host,
            port=self._listener.getsockname()[1],
            token=offer.token,
            shards=None if whole else tuple(PeerShard(name, held.box.bounds) for name, held in slices.items()),
        )

    def release(self, version: PolicyVersion) -> None:
        """The version's memory may be used again."""
        if self._offer is not None and self._offer.version == version:
            self._end_offer()
        self._held.release(version)

    def close(self) -> None:
        """End everything. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._accepting.join()
            self._listener.close()
        self._end_offer()
        self._fabric.close()
        self._held.close()
        self._spare.clear()

    def _end_offer(self) -> None:
        with self._lock:
            offer, self._offer = self._offer, None
            writers = () if offer is None else tuple(offer.writers)
        if offer is None:
            return
        offer.over.set()
        deadline = time.monotonic() + self._timeout_s
        for writer in writers:
            writer.join(max(0.0, deadline - time.monotonic()))
            if writer.is_alive():
                raise DeliveryError("a write of weights to an engine is stuck; look at the network, restart the run")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="p2p-write", daemon=True).start()
            except (OSError, RuntimeError):  # closed; too many files or threads; or the other side was gone already
                self._closed.wait(_ACCEPT_S)

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        try:
            hello: Hello = line.receive(Hello, _HELLO_BYTES, _HELLO_S)
            offer = self._offered(hello.token)
            ask: Ask | None = None if offer is None else line.receive(Ask, _ASK_BYTES, self._timeout_s)
            if offer is None or ask is None or not self._enter(offer):
                line.send(_failed("its offer is over, or the token is wrong"), _HELLO_S)
                return
            try:
                answer = self._answer(offer, ask, line)
            finally:
                with self._lock:
                    offer.writers.discard(threading.current_thread())
            line.send(answer, _HELLO_S)
        except LineError:  # it left: nobody to tell
            return
        finally:
            line.close()

    def _offered(self, token: str) -> _Offer | None:
        with self._lock:
            offer = self._offer
        return offer if offer is not None and hmac.compare_digest(offer.token.encode(), token.encode()) else None

    def _enter(self, offer: _Offer) -> bool:
        """Begin to write because of an offer. False: it is over."""
        with self._lock:
            if self._offer is not offer:
                return False
            offer.writers.add(threading.current_thread())
            return True

    def _answer(self, offer: _Offer, ask: Ask, line: Line) -> Done | Failed:
        deadline = time.monotonic() + self._timeout_s

        def stop() -> str | None:
            if offer.over.is_set():
                return "its offer is over"
            if line.left:
                return "the engine gave up"
            return f"it took more than {self._timeout_s:g} s" if time.monotonic() > deadline else None

        if ask.engine not in offer.engines or ask.version != offer.version:
            return _failed(f"{ask.version.name} is not offered to {ask.engine}")
        try:
            peer = self._meet(ask)
            batches = self._batches(ask.places, self._held.find(offer.version))
            return Done(moved_bytes=sum(self._write(peer, batch, stop) for batch in batches))
        except PayloadError as error:
            return Failed(kind=FailureKind.PAYLOAD, reason=str(error))
        except FabricError as error:
            return _failed(error.reason)
        except _UndeliveredError as error:
            with self._lock:
                self._peers.pop((ask.engine, ask.rank), None)  # the fabric has forgotten it
            return Failed(kind=FailureKind.TRANSFER, reason=error.reason, suspects=error.suspects)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever went wrong, the engine has to know
            return _failed(f"{type(error).__name__}: {error}")

    def _meet(self, ask: Ask) -> str:
        """The fabric's name of a receiving rank. One that registered other memory, or was restarted, is met anew."""
        key = (ask.engine, ask.rank)
        with self._lock:
            known = self._peers.get(key)
        if known is not None and known.description == ask.fabric:
            return known.name
        if known is not None:
            self._fabric.forget(known.name)
        name = self._fabric.meet(ask.fabric)
        with self._lock:
            self._peers[key] = _Peer(ask.fabric, name)
        return name

    def _write(self, peer: str, batch: Sequence[_Part], stop: Stop) -> int:
        """One call of the fabric; returns the bytes. Raises `_UndeliveredError`."""
        try:
            self._fabric.write(peer, [part.write for part in batch], stop)
        except FabricError as error:
            suspects = batch if error.suspects is None else [batch[index] for index in error.suspects]
            raise _UndeliveredError(error.reason, list(dict.fromkeys(part.name for part in suspects))) from error
        return sum(part.write.size_bytes for part in batch)

    def _batches(self, places: Sequence[Place], held: Mapping[str, HeldSlice]) -> Iterator[list[_Part]]:
        """What to write in one call each: all of it, unless more has to be packed than there is room for.

        Raises `PayloadError` for what is not held.
        """
        batch: list[_Part] = []
        spare: Tensor | None = None
        used = 0
        try:
            for place in places:
                piece, size_bytes = _held(place, held)
                address = piece.address(place.box)
                if address is None:
                    spare = self._take_spare() if spare is None else spare
                    if used + size_bytes > PIECE_BYTES:
                        yield batch
                        batch, used = [], 0
                    piece.pack(place.box, spare[used : used + size_bytes])
                    address = spare.data_ptr() + used
                    used += size_bytes
                batch.append(_Part(place.name, Write(address, place.address, size_bytes)))
            yield batch
        finally:
            if spare is not None:
                with self._lock:
                    self._spare.append(spare)

    def _take_spare(self) -> Tensor:
        """uint8 [PIECE_BYTES], registered, for parts that do not lie in one piece here."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return registered_memory(self._fabric, PIECE_BYTES)


def _failed(reason: str) -> Failed:
    return Failed(kind=FailureKind.TRANSFER, reason=reason)


def _held(place: Place, held: Mapping[str, HeldSlice]) -> tuple[HeldSlice, int]:
    """The slice in which a piece lies, and the size of the piece."""
    piece = held.get(place.name)
    if piece is not None and piece.box == place.box:  # as most are
        size_bytes = piece.memory.numel()
    elif piece is not None and piece.box.intersect(place.box) == place.box:
        size_bytes = place.box.elements * piece.item_bytes
    else:
        size_bytes = 0
    if piece is None or not size_bytes:
        raise PayloadError(f"{place.box.bounds} of tensor {place.name!r} is not held here; publish it again")
    if size_bytes > PIECE_BYTES:
        raise PayloadError(f"a piece of {place.name!r} has {size_bytes} bytes, more than {PIECE_BYTES}; ask for less")
    return piece, size_bytes
