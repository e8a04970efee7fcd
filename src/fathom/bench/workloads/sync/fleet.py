"""Publications to receivers in processes of their own, beside the same bytes by the bare library."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
from torch import Tensor

from fathom.bench.record import Sample, Say, median, values
from fathom.bench.rig.fleet.made_up import change, forms_of, made_up_weights
from fathom.bench.rig.fleet.messages import RawKind
from fathom.bench.rig.fleet.raw.line import RawLine
from fathom.bench.rig.fleet.raw.link import available
from fathom.bench.rig.fleet.receiver_process import QUIET, ReceiverProcess
from fathom.bench.rig.fleet.timed_transport import TimedTransport
from fathom.bench.workloads.sync.answer import PartAnswer
from fathom.bench.workloads.sync.names import (
    COMMIT,
    COPY,
    DIGEST,
    HOLD,
    MOVED,
    PAUSE,
    TRANSFER,
    VERIFY,
    fleet_variant,
    host_variant,
    transport_name,
)
from fathom.config.families import FabricKind, TransportKind
from fathom.config.sync import BroadcastConfig, PeerConfig, SyncConfig
from fathom.core.errors import EngineError, NoProgressError
from fathom.core.ids import EngineId
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import copy_bytes, digest
from fathom.sync.publication import Publication
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

MB = 10**6
_MEMORY_FACTS = Path("/proc/meminfo")
_WARM = 2
"""Publications before those counted: after two, every buffer of a double-buffered receiver has been touched."""
_COPIES_SENDER, _COPIES_RECEIVER = 5, 3
"""How often a version lies in memory at once: the weights, two held, a raw buffer, change; two sets, a raw buffer."""


class Node(msgspec.Struct, frozen=True, tag="bench_node.1"):
    """A machine, or what plays one."""

    host: str
    """Its address."""
    prefix: tuple[str, ...] = ()
    """Comes before a command line to run it there."""


class FleetRequest(msgspec.Struct, frozen=True, tag="bench_fleet.1"):
    """What to measure."""

    sizes_mb: tuple[int, ...]
    """Sizes of a version, in 10^6 bytes."""
    receivers: tuple[int, ...]
    """Numbers of receivers."""
    transports: tuple[TransportKind, ...]
    """Which transports."""
    shards: tuple[int, ...]
    """Numbers of ranks over which one receiver of `p2p` is spread, beside whole ones."""
    repeats: int
    """Publications counted of each."""
    changed: float
    """Share of elements that differ from one version to the next."""
    folder: str
    """Where `disk`, `delta` and logs go."""
    nodes: tuple[Node, ...]
    """The sender's, then one for each receiver."""
    link: str = ""
    """What lies between them, in words. Empty: nothing, one machine."""


async def measure_fleet(request: FleetRequest, say: Say) -> PartAnswer:
    """Every transport to every number of receivers at every size."""
    os.environ.update(QUIET)
    samples: list[Sample] = []
    failures: list[str] = []
    pairs, notes = _pairs(request.transports)
    crew = _Crew(Path(request.folder), request.nodes[1:])
    try:
        for size_mb in request.sizes_mb:
            lacking = {count: lack for count in request.receivers if (lack := _missing_mb(size_mb, count)) > 0}
            notes += [
                f"{size_mb} MB to {count}: left out, {lack} MB of memory are missing" for count, lack in lacking.items()
            ]
            counts = [count for count in request.receivers if count not in lacking]
            if not counts:
                continue
            weights = made_up_weights(size_mb * MB)
            if not request.link:
                samples += _host(weights, size_mb, request.repeats)
            for transport, raw, count, shards in _cases(request, pairs, counts):
                case = _Case(request, transport, raw, size_mb, crew.first(count), shards)
                try:
                    samples += await case.measure(weights)
                except Exception as error:  # noqa: BLE001 - the boundary: whatever fails, the others are measured
                    failures.append(f"{case.variant}: {type(error).__name__}: {error}")
                    await crew.close()
                say(case.told(samples))
    finally:
        await crew.close()
    return PartAnswer(samples=tuple(samples), failures=tuple(failures), notes=tuple(notes))


_RAW = {
    TransportKind.BROADCAST: (RawKind.GLOO,),
    TransportKind.P2P: (RawKind.NIXL, RawKind.MOONCAKE),
}
"""What a transport is compared with: the library below it. Without it, it is not measured."""
_FABRICS = {RawKind.NIXL: FabricKind.NIXL, RawKind.MOONCAKE: FabricKind.MOONCAKE}


def _pairs(transports: Sequence[TransportKind]) -> tuple[list[tuple[TransportKind, RawKind | None]], list[str]]:
    """Transports beside the library below them (None: there is none), and what was left out."""
    pairs: list[tuple[TransportKind, RawKind | None]] = []
    notes: list[str] = []
    for transport in transports:
        for kind in _RAW.get(transport, (None,)):
            if kind is None or available(kind):
                pairs.append((transport, kind))
            else:
                notes.append(f"{transport} by {kind}: left out, it is not installed")
    return pairs, notes


def _cases(
    request: FleetRequest, pairs: Sequence[tuple[TransportKind, RawKind | None]], counts: Sequence[int]
) -> Iterator[tuple[TransportKind, RawKind | None, int, int]]:
    """With the number of receivers, and of ranks of each."""
    for count in counts:
        yield from ((*pair, count, 1) for pair in pairs)
    if 1 in counts:
        yield from ((*pair, 1, shards) for pair in pairs if pair[0] is TransportKind.P2P for shards in request.shards)


@final
class _Crew:
    """Receiver processes, started when they are first needed. After a failure all are replaced."""

    def __init__(self, folder: Path, nodes: Sequence[Node]) -> None:
        self._folder = folder
        self._nodes = nodes
        self._receivers: list[ReceiverProcess] = []

    def first(self, count: int) -> list[ReceiverProcess]:
        """So many of them."""
        while len(self._receivers) < count:
            index = len(self._receivers)
            engine, node = EngineId(f"receiver-{index}"), self._nodes[index]
            self._receivers.append(ReceiverProcess.launch(engine, self._folder, prefix=node.prefix, host=node.host))
        return self._receivers[:count]

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(receiver.close() for receiver in self._receivers))
        self._receivers.clear()


@dataclass(frozen=True, slots=True)
class _Case:
    """One transport, one size, one set of receivers."""

    request: FleetRequest
    transport: TransportKind
    raw: RawKind | None
    size_mb: int
    receivers: Sequence[ReceiverProcess]
    shards: int = 1

    @property
    def variant(self) -> str:
        """Its name in the record."""
        return self._named(transport_name(self.transport, self.raw))

    def told(self, samples: Sequence[Sample]) -> str:
        """How it went, in a line."""
        if not values(samples, self.variant, TRANSFER):
            return f"{self.variant}: FAILED"
        return f"{self.variant}: transfer {median(samples, self.variant, TRANSFER) * 1e3:.0f} ms"

    async def measure(self, weights: dict[str, Tensor]) -> list[Sample]:
        """Publications and raw transfers in turn."""
        samples: list[Sample] = []
        async with self._open(weights) as (publisher, timed, line):
            for number in range(_WARM + self.request.repeats):
                change(weights, self.request.changed, seed=number)
                repeat = number - _WARM
                for turn in (0, 1) if repeat % 2 else (1, 0):
                    if turn:
                        taken = await self._publish(publisher, timed, weights, number)
                    else:
                        taken = await self._round(line, repeat)
                    samples += taken if repeat >= 0 else []
        return samples

    @asynccontextmanager
    async def _open(
        self, weights: dict[str, Tensor]
    ) -> AsyncGenerator[tuple[Publisher, TimedTransport, RawLine | None]]:
        config = _config(self.transport, self.raw, len(self.receivers), self.request.nodes[0].host)
        forms = forms_of(weights)
        size_bytes = sum(tensor.nbytes for tensor in weights.values())
        async with AsyncExitStack() as stack:
            for receiver in self.receivers:
                await receiver.open(forms, shards=self.shards)
                stack.push_async_callback(_quietly, receiver.drop)
            line = None
            if self.raw is not None:
                line = await RawLine.open(self.raw, self.receivers, size_bytes, self.request.nodes[0].host)
                stack.push_async_callback(_quietly, line.close)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self.request.folder))
            timed = TimedTransport(TRANSPORTS[self.transport](Path(folder), config))
            publisher = Publisher(self.receivers, timed, config)
            stack.push_async_callback(publisher.close)
            yield publisher, timed, line

    async def _publish(
        self, publisher: Publisher, timed: TimedTransport, weights: dict[str, Tensor], number: int
    ) -> list[Sample]:
        publication = await publisher.publish(weights, number, 1, InFlightMode.CONTINUE)
        if publication.fenced:
            raise NoProgressError(f"a receiver failed: {dict(publication.fenced)}")
        return publication_samples(self.variant, number - _WARM, publication, timed, len(self.receivers) * self.shards)

    async def _round(self, line: RawLine | None, repeat: int) -> list[Sample]:
        if line is None:
            return []
        variant, value = self._named(f"raw {self.raw}"), await line.round()
        return [Sample(variant=variant, measure=TRANSFER, unit="s", repeat=repeat, value=value)]

    def _named(self, what: str) -> str:
        return fleet_variant(what, self.size_mb, len(self.receivers), self.request.link, self.shards)


def _config(transport: TransportKind, raw: RawKind | None, receivers: int, host: str) -> SyncConfig:
    """Defaults, but for where the sender is met, and by which library."""
    return SyncConfig(
        transport=transport,
        min_engines=receivers,
        broadcast=BroadcastConfig(host=host) if transport is TransportKind.BROADCAST else None,
        p2p=PeerConfig(host=host, fabric=_FABRICS[raw]) if transport is TransportKind.P2P and raw else None,
    )


def publication_samples(
    variant: str, repeat: int, publication: Publication, timed: TimedTransport, receivers: int
) -> list[Sample]:
    """The phases apart. `receivers` are counted by rank."""
    measures = {
        DIGEST: publication.write_s - timed.hold_s,
        HOLD: timed.hold_s,
        TRANSFER: timed.offer_s + publication.stage_s,
        VERIFY: publication.verify_s,
        COMMIT: publication.commit_s,
        PAUSE: publication.pause_s,
    }
    samples = [
        Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value)
        for measure, value in measures.items()
    ]
    moved = publication.moved_bytes / receivers / MB
    return [*samples, Sample(variant=variant, measure=MOVED, unit="MB", repeat=repeat, value=moved)]


def _host(weights: dict[str, Tensor], size_mb: int, repeats: int) -> list[Sample]:
    """Copy and digest in turn."""
    spare = {name: tensor.clone() for name, tensor in weights.items()}
    samples: list[Sample] = []
    for repeat in range(-1, repeats):
        began = time.perf_counter()
        for name, tensor in weights.items():
            copy_bytes(tensor, spare[name])
        copied = time.perf_counter()
        digest(weights)
        digested = time.perf_counter()
        if repeat >= 0:
            for measure, value in ((COPY, copied - began), (DIGEST, digested - copied)):
                variant = host_variant(size_mb)
                samples.append(Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value))
    return samples


def _missing_mb(size_mb: int, receivers: int) -> int:
    """Memory that is not there. At most 0: there is enough, or the system does not say."""
    if not _MEMORY_FACTS.exists():
        return 0
    facts = _MEMORY_FACTS.read_text().split()
    free_mb = int(facts[facts.index("MemAvailable:") + 1]) * 1024 // MB
    return size_mb * (_COPIES_SENDER + _COPIES_RECEIVER * receivers) - free_mb


async def _quietly(close: Callable[[], Awaitable[None]]) -> None:
    """A receiver that died has been reported for what it died of; otherwise the next case finds out."""
    with suppress(EngineError):
        await close()


def one_machine(receivers: int) -> tuple[Node, ...]:
    """Everything here."""
    return (Node(host="127.0.0.1"),) * (1 + receivers)


def run_fleet(request: FleetRequest, say: Say) -> PartAnswer:
    """See `measure_fleet`."""
    return asyncio.run(measure_fleet(request, say))
