"""What was aimed at, from the samples of a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fathom.bench.options import SyncOptions
from fathom.bench.record import Sample, Target, median, ratios
from fathom.bench.rig.fleet.messages import RawKind
from fathom.bench.workloads.sync.names import (
    COPY,
    DIGEST,
    MOVED,
    NETWORK_RECEIVERS,
    TRANSFER,
    fleet_variant,
    has,
    host_variant,
    link_name,
    transport_name,
)

_TIMES_RAW = 1.3
_DIGEST_SPEED = 0.5
_VECTORS = 1.01
"""Every rank needs the norms whole."""
_COMPARED = (
    ("broadcast", RawKind.GLOO),
    ("p2p", RawKind.NIXL),
    ("p2p", RawKind.MOONCAKE),
)


def fleet_ratios(options: SyncOptions, samples: Sequence[Sample]) -> list[Sample]:
    """Transfers over those of the bare library, and copies over digests, repeat by repeat."""
    found: list[Sample] = []
    for ours, raw in _pairs(options, samples):
        found += ratios(samples, TRANSFER, ours, raw)
    for size_mb in options.sizes_mb:
        variant = host_variant(size_mb)
        copies, digests = ([s for s in samples if (s.variant, s.measure) == (variant, m)] for m in (COPY, DIGEST))
        found += [
            Sample(variant=variant, measure=_SPEED, unit="", repeat=copy.repeat, value=copy.value / other.value)
            for copy, other in zip(copies, digests, strict=True)
        ]
    return found


def fleet_targets(options: SyncOptions, samples: Sequence[Sample]) -> Iterator[Target]:
    """Against the bare libraries, and against memory. `samples` include `fleet_ratios`."""
    for ours, raw in _pairs(options, samples):
        pair = f"{ours} / {raw}"
        yield Target(
            claim=f"transfer of {ours}, times {raw.partition(',')[0]}",
            measured=median(samples, pair, f"{TRANSFER}, ratio"),
            limit=_TIMES_RAW,
            at_most=True,
            required=False,
        )
    yield from _shard_targets(options, samples)
    for size_mb in options.sizes_mb:
        variant = host_variant(size_mb)
        if has(samples, variant):
            measured = median(samples, variant, _SPEED)
            claim = f"{variant}: digest, times as fast as a copy"
            yield Target(claim=claim, measured=measured, limit=_DIGEST_SPEED, at_most=False, required=False)


def _shard_targets(options: SyncOptions, samples: Sequence[Sample]) -> Iterator[Target]:
    """That a rank gets its part of the bytes, and little more."""
    for transport, kind in _COMPARED:
        for size_mb in options.sizes_mb:
            whole = fleet_variant(transport_name(transport, kind), size_mb, 1)
            for shards in options.shards:
                sharded = fleet_variant(transport_name(transport, kind), size_mb, 1, shards=shards)
                if has(samples, sharded) and has(samples, whole):
                    yield Target(
                        claim=f"{sharded}: bytes to each rank, over those to a whole receiver",
                        measured=median(samples, sharded, MOVED) / median(samples, whole, MOVED),
                        limit=_VECTORS / shards,
                        at_most=True,
                        required=False,
                    )


def failure_target(failures: Sequence[str]) -> Target:
    """That everything asked for was measured."""
    claim = "combinations that could not be measured"
    return Target(claim=claim, measured=len(failures), limit=0, at_most=True, required=True)


_SPEED = "digest over copy, speed"


def _pairs(options: SyncOptions, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Variants beside their raw ones, where both were measured."""
    places = [(size, count, "", 1) for size in options.sizes_mb for count in options.receivers]
    places += [(size, 1, "", shards) for size in options.sizes_mb for shards in options.shards]
    for mbit_per_s in options.network_mbit_per_s:
        places += [(options.network_size_mb, count, link_name(mbit_per_s), 1) for count in NETWORK_RECEIVERS]
    for transport, kind in _COMPARED:
        for place in places:
            ours = fleet_variant(transport_name(transport, kind), *place)
            raw = fleet_variant(f"raw {kind}", *place)
            if has(samples, ours) and has(samples, raw):
                yield ours, raw
