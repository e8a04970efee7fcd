"""What variants and measures are called in a record, for those who measure and those who draw."""

from __future__ import annotations

from collections.abc import Sequence

from fathom.bench.record import Sample

DIGEST, HOLD, TRANSFER, VERIFY, COMMIT, PAUSE = "digest", "write", "transfer", "verify", "commit", "paused"
"""Phases of a publication, in their order: the trainer's digest; its copy; the engines' receiving; their digest."""
MOVED = "moved to each"
"""Bytes that travelled, over the receivers."""
COPY = "copy"
"""One thread copying the bytes in memory."""
END_TO_END = "end to end"
"""All phases together."""
NETWORK_RECEIVERS = (1, 2)
"""Numbers of receivers over slow links."""


def host_variant(size_mb: int) -> str:
    """What one thread does with the bytes alone."""
    return f"one thread, {size_mb} MB"


def transport_name(transport: str, library: str | None) -> str:
    """E.g. `p2p by NIXL`; the library is named where there is a choice."""
    return f"{transport} by {library}" if transport == "p2p" and library is not None else transport


def fleet_variant(what: str, size_mb: int, receivers: int, link: str = "", shards: int = 1) -> str:
    """E.g. `broadcast, 100 MB to 4`, or `p2p by NIXL, 100 MB to 1 of 2 ranks`."""
    ranks = f" of {shards} ranks" if shards > 1 else ""
    return f"{what}, {size_mb} MB to {receivers}{ranks}" + (f" over {link}" if link else "")


def link_name(mbit_per_s: float) -> str:
    """E.g. `1 Gbit/s`."""
    return f"{mbit_per_s / 1000:g} Gbit/s" if mbit_per_s >= 1000 else f"{mbit_per_s:g} Mbit/s"


def has(samples: Sequence[Sample], variant: str) -> bool:
    """Whether anything of this variant was measured."""
    return any(sample.variant == variant for sample in samples)
