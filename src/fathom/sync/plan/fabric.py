"""Rates of machines: links, memory, codecs, storage. Each comes from somewhere, and says from where."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What moves bytes between ranks, and how fast. A rate that is None is not known: its phase is not estimated."""

    name: str
    """Its name."""
    about: str
    """Where the numbers come from."""
    gather_bytes_per_s: float
    """At which a rank of a stage receives the stage's tensors from the other ranks of it."""
    collective_bytes_per_s: float
    """At which a source's link passes bytes of a broadcast."""
    broadcasts_in_tree: bool
    """A broadcast is a tree with the source at its root, as in Gloo; else a chain, as in NCCL."""
    p2p_bytes_per_s: float
    """At which one source writes into receivers' memory, all its receivers together."""
    chain_s: float
    """Seconds that one bucket of a broadcast takes longer for each receiver in the chain."""
    layout_bytes_per_s: float | None
    """At which a source of p2p lays tensors out as an engine rank holds them. None: they need no change."""
    shared_bytes_per_s: float | None
    """At which one process copies to or from memory shared on a host. None: not known."""
    digest_bytes_per_s: float | None
    """At which one process digests. None: not known."""
    register_bytes_per_s: float | None
    """At which memory is registered with a network card, once. None: not known."""
    swap_s: float
    """Seconds that an engine with two weight sets stands still at a commit."""
    cores: int | None = None
    """Cores that all receivers on one host share. None: each receiver has what it needs."""

    def sends(self, receivers: int) -> int:
        """How many times a source sends what it broadcasts: once into a chain, in each round of a tree else."""
        return tree_rounds(receivers) if self.broadcasts_in_tree else 1

    def contention(self, receivers: int) -> float:
        """How many times longer work lasts that `receivers` processes of one host do at once."""
        return 1.0 if self.cores is None else max(1.0, receivers / self.cores)


def tree_rounds(receivers: int) -> int:
    """Rounds until all have it, when in each round all that have it pass it on to one each; the source sends in all."""
    return receivers.bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A file system or object store that trainer and engines see."""

    bytes_per_s: float
    """Bandwidth it gives in all; who reads at once shares it."""

    def __post_init__(self) -> None:
        if not 1e3 <= self.bytes_per_s <= 1e14:
            raise ConfigError(
                f"storage of {self.bytes_per_s / 1e6:g} MB/s? Give --storage-mbps from 0.001 to 1e8, e.g. 200"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRates:
    """What deltas cost."""

    ratio: float
    """Bytes of a delta over bytes of the full version."""
    encode_bytes_per_s: float
    """Full bytes that one host of the trainer compares and encodes in a second."""
    decode_bytes_per_s: float
    """Full bytes that one host of engines rebuilds and checks in a second."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"a delta of {self.ratio:g} times the full bytes? Give --delta-ratio above 0, at most 1")


FABRICS: dict[str, Fabric] = {
    "infiniband-h100": Fabric(
        name="infiniband-h100",
        about="Links: 8 cards of 400 Gb/s a node, one a GPU (ConnectX-7 of an H100 node). chain_s and "
        "layout_bytes_per_s are fitted to two published figures (fathom plan sync --check). Registration: 'tens of "
        "seconds' for a replica of 32 GB (LMSYS, 2026-04-29), taken as 1 GB/s. The gather is charged at the card's "
        "rate inside a node too.",
        gather_bytes_per_s=50e9,
        collective_bytes_per_s=50e9,
        broadcasts_in_tree=False,
        p2p_bytes_per_s=50e9,
        chain_s=101.7e-6,
        layout_bytes_per_s=8.13e9,
        shared_bytes_per_s=None,
        digest_bytes_per_s=None,
        register_bytes_per_s=1e9,
        swap_s=0.0,
    ),
    "ethernet-10g": Fabric(
        name="ethernet-10g",
        about="Links: 10 Gb/s a host; broadcasts by Gloo. Digests: BLAKE3 on one thread, measured here. chain_s is a "
        "guess, and nothing is fitted. --link-gbps sets another speed.",
        gather_bytes_per_s=1.25e9,
        collective_bytes_per_s=1.25e9,
        broadcasts_in_tree=True,
        p2p_bytes_per_s=1.25e9,
        chain_s=1e-4,
        layout_bytes_per_s=None,
        shared_bytes_per_s=None,
        digest_bytes_per_s=4.5e9,
        register_bytes_per_s=1.6e9,
        swap_s=2.5e-3,
    ),
    "loopback": Fabric(
        name="loopback",
        about="Rates between processes of one host with 2 cores, measured once with 256 MB: Gloo 2.8 to 5.6 GB/s, "
        "NIXL 4.4 to 6.4, warm copies through shared memory 11 to 19, BLAKE3 on one thread. Another machine has "
        "others: fathom bench sync, then --measured.",
        gather_bytes_per_s=2.8e9,
        collective_bytes_per_s=2.8e9,
        broadcasts_in_tree=True,
        p2p_bytes_per_s=4.4e9,
        chain_s=2e-4,
        layout_bytes_per_s=None,
        shared_bytes_per_s=11e9,
        digest_bytes_per_s=4.5e9,
        register_bytes_per_s=1.6e9,
        swap_s=2.5e-3,
        cores=2,
    ),
}
"""By the name that is typed."""

STORAGE_BYTES_PER_S = 1e9
"""Unless told otherwise."""
ENCODE_BYTES_PER_S = 0.8e9
"""Comparison, encoding and compression on one thread, unless told otherwise: SmolLM2-135M in bfloat16, with 0.9 % of
the elements changed."""
DECODE_BYTES_PER_S = 1.6e9
"""Decompression and application (2.5 GB/s of the same, on one thread), then a checksum of the result (4.5 GB/s)."""
