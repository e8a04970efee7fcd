"""Seconds per phase of one publication, by transport. Every formula of the plan is on this page."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.core.ports.engine import ReceivesInto
from fathom.sync.plan.fabric import DeltaRates, Fabric, Storage
from fathom.sync.plan.layout import Topology
from fathom.sync.plan.model_size import ModelSize, Served
from fathom.sync.plan.traffic import BUCKET_BYTES, Traffic

NAMES = ("shared", "disk", "broadcast", "p2p", "delta")
"""Every transport, the one with the fewest parts first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is asked."""

    model: ModelSize
    """The model."""
    served: Served
    """Element type of what is published."""
    topology: Topology
    """Ranks and hosts."""
    fabric: Fabric
    """Links and memory."""
    storage: Storage
    """What files go through."""
    delta: DeltaRates
    """What deltas cost."""
    receives_into: ReceivesInto = ReceivesInto.STAGING
    """Where engines are written to: beside what they serve, or over it while they are paused."""
    bucket_bytes: int = BUCKET_BYTES
    """Size of a bucket."""

    def traffic(self) -> Traffic:
        """What has to be moved."""
        return Traffic.of(self.model, self.served, self.topology, self.bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One transport that can be used. Seconds; None where no rate is known, which counts as 0 in the total."""

    transport: str
    """Its name."""
    gather_s: float
    """Until sources hold whole tensors, as far as nothing else hides it."""
    setup_s: float | None
    """Once, before the first publication; not in the total."""
    transfer_s: float
    """Bytes on their way: to the medium and from it."""
    verify_s: float | None
    """Digests of trainer and engines."""
    load_s: float
    """Laying tensors out as engines hold them: converting, encoding, decoding."""
    total_s: float
    """From the trainer's new weights until all engines serve them: all of the above but the setup."""
    pause_s: float
    """Of the total: how long generation stands still."""
    moved_bytes: float
    """Bytes that engines receive, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """One transport that cannot be used."""

    transport: str
    """Its name."""
    reason: str
    """Why not, and what would make it possible."""


def estimates(scenario: Scenario) -> list[Estimate | Impossible]:
    """One for each of `NAMES`, in that order."""
    return [_shared(scenario), _disk(scenario), broadcast(scenario), p2p(scenario), _delta(scenario)]


def broadcast(scenario: Scenario) -> Estimate:
    """Bucketed: one source per stage sends every tensor to every engine rank.

    Sources take turns, one bucket at a time, so the bytes of all stages pass one link; each bucket runs down the chain
    of receivers, or leaves the source in each round of a tree. Within one host it is the cores that do this work. A
    source gathers its next bucket while others send: with one stage nothing hides the gather.
    """
    traffic, fabric = scenario.traffic(), scenario.fabric
    one_host = scenario.topology.one_host
    times = fabric.contention(traffic.receivers + 1) if one_host else fabric.sends(traffic.receivers)  # it works too
    sending_s = traffic.full_bytes / fabric.collective_bytes_per_s * times
    sending_s += traffic.buckets * traffic.receivers * fabric.chain_s
    gathering_s = traffic.gathered_bytes / fabric.gather_bytes_per_s
    exposed_s = max(0.0, gathering_s + sending_s / traffic.stages - sending_s)
    return _estimate(
        scenario,
        "broadcast",
        gather_s=exposed_s,
        setup_s=None,
        transfer_s=sending_s,
        load_s=0.0,
        moved_bytes=traffic.full_bytes * traffic.receivers,
    )


def p2p(scenario: Scenario) -> Estimate:
    """Each engine rank is written just what it needs, by every stage; all ranks of the trainer are sources.

    A source gathers its stage, lays it out for one engine rank after the other, and writes. It has one buffer: writes
    of a layout end before the next one is laid out. Those of the last layout go on beside the next bucket's work.
    """
    traffic, fabric = scenario.traffic(), scenario.fabric
    gathering_s = traffic.gathered_bytes / fabric.gather_bytes_per_s
    shard_bytes = traffic.rank_bytes / traffic.stages * traffic.layouts_per_source
    writing_s = shard_bytes * traffic.writes_per_layout / fabric.p2p_bytes_per_s
    laying_s = 0.0 if fabric.layout_bytes_per_s is None else shard_bytes / fabric.layout_bytes_per_s
    hidden = min(writing_s / traffic.layouts_per_source, laying_s)
    registered = shard_bytes if fabric.layout_bytes_per_s is not None else traffic.rank_bytes
    return _estimate(
        scenario,
        "p2p",
        gather_s=gathering_s,
        setup_s=None if fabric.register_bytes_per_s is None else registered / fabric.register_bytes_per_s,
        transfer_s=writing_s - hidden,
        load_s=laying_s,
        moved_bytes=traffic.rank_bytes * traffic.receivers,
    )


def _shared(scenario: Scenario) -> Estimate | Impossible:
    """One copy into shared memory by the trainer, one out of it by each engine."""
    topology, rate = scenario.topology, scenario.fabric.shared_bytes_per_s
    if not topology.one_host:
        return Impossible(
            transport="shared", reason=f"needs one host, and trainer and engines are on {topology.hosts} of them"
        )
    if rate is None:
        return Impossible(
            transport="shared",
            reason=f"no rate of shared memory is known for {scenario.fabric.name}; use --fabric loopback",
        )
    traffic = scenario.traffic()
    return _estimate(
        scenario,
        "shared",
        gather_s=0.0,
        setup_s=traffic.full_bytes / (scenario.fabric.register_bytes_per_s or rate),
        transfer_s=traffic.full_bytes / rate * (1 + _contention(scenario)),
        load_s=0.0,
        moved_bytes=traffic.full_bytes * topology.engines.engines,
    )


def _disk(scenario: Scenario) -> Estimate:
    """The trainer writes the version once; each host with engines reads what its ranks need of it."""
    traffic, topology = scenario.traffic(), scenario.topology
    read_bytes = traffic.host_bytes * topology.engine_hosts
    return _estimate(
        scenario,
        "disk",
        gather_s=traffic.gathered_bytes / scenario.fabric.gather_bytes_per_s,
        setup_s=0.0,
        transfer_s=(traffic.full_bytes + read_bytes) / scenario.storage.bytes_per_s,
        load_s=0.0,
        moved_bytes=read_bytes,
    )


def _delta(scenario: Scenario) -> Estimate | Impossible:
    """What changed goes through the storage; every host of the trainer encodes its part, every engine host decodes."""
    traffic, rates, topology = scenario.traffic(), scenario.delta, scenario.topology
    if rates.ratio >= 1:
        return Impossible(
            transport="delta",
            reason="a delta would be as large as the version: nearly every value changes at this learning rate and "
            "element type; use disk",
        )
    read_bytes = traffic.host_bytes * topology.engine_hosts * rates.ratio
    written_bytes = traffic.full_bytes * rates.ratio
    return _estimate(
        scenario,
        "delta",
        gather_s=traffic.gathered_bytes / scenario.fabric.gather_bytes_per_s,
        setup_s=traffic.full_bytes / scenario.storage.bytes_per_s,
        transfer_s=(written_bytes + read_bytes) / scenario.storage.bytes_per_s,
        load_s=coding_s(scenario),
        moved_bytes=read_bytes,
    )


def coding_s(scenario: Scenario) -> float:
    """Seconds to encode a delta and to decode it, wherever it goes through."""
    traffic, rates = scenario.traffic(), scenario.delta
    encoding_s = traffic.full_bytes / (rates.encode_bytes_per_s * scenario.topology.trainer_hosts)
    return encoding_s + traffic.host_bytes / rates.decode_bytes_per_s * _contention(scenario)


def _contention(scenario: Scenario) -> float:
    """Of all receivers at work at once."""
    return scenario.fabric.contention(scenario.topology.engines.gpus) if scenario.topology.one_host else 1.0


def _verify_s(scenario: Scenario, traffic: Traffic) -> float | None:
    """The trainer digests what it publishes, its ranks their part of it; then each engine rank what it holds."""
    rate = scenario.fabric.digest_bytes_per_s
    if rate is None:
        return None
    return traffic.full_bytes / scenario.topology.trainer.gpus / rate + traffic.rank_bytes / rate * _contention(
        scenario
    )


def _estimate(
    scenario: Scenario,
    transport: str,
    *,
    gather_s: float,
    setup_s: float | None,
    transfer_s: float,
    load_s: float,
    moved_bytes: float,
) -> Estimate:
    """Add the digests, which are the same for all, and the pause, which the engine decides."""
    verify_s = _verify_s(scenario, scenario.traffic())
    live = scenario.receives_into is ReceivesInto.LIVE
    total_s = gather_s + transfer_s + (verify_s or 0.0) + load_s
    return Estimate(
        transport=transport,
        gather_s=gather_s,
        setup_s=setup_s,
        transfer_s=transfer_s,
        verify_s=verify_s,
        load_s=load_s,
        total_s=total_s,
        pause_s=total_s if live else scenario.fabric.swap_s,
        moved_bytes=moved_bytes,
    )
