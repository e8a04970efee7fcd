"""Bytes: how many go where, for a model and two layouts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from fathom.sync.plan.layout import EngineLayout, Topology, TrainerLayout
from fathom.sync.plan.model_size import ModelSize, Served

BUCKET_BYTES = 1 << 30
"""Size of a bucket unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What has to be moved."""

    full_bytes: int
    """The version, whole."""
    gathered_bytes: float
    """What a rank holds of its stage after the gather; the largest stage is taken to be the mean one."""
    rank_bytes: float
    """What one engine rank needs."""
    host_bytes: float
    """What all engine ranks of one host need together: never more than the whole version."""
    buckets: float
    """Buckets of a broadcast, over all stages."""
    stages: int
    """Pipeline stages, each with its own source of a broadcast."""
    sources: int
    """Ranks that send in p2p."""
    receivers: int
    """Engine ranks."""
    layouts_per_source: int
    """Different shards that one p2p source lays out: each of its stage's part of one engine rank's tensors."""
    writes_per_layout: int
    """Engines that each of these is written to."""

    @classmethod
    def of(cls, model: ModelSize, served: Served, topology: Topology, bucket_bytes: int = BUCKET_BYTES) -> Self:
        """Count. Experts are split over EP and within it, everything else over TP / DP ranks."""
        trainer, engines = topology.trainer, topology.engines
        full_bytes = model.params * served.element_bytes
        experts_bytes = model.expert_params * served.element_bytes / engines.tp
        other_bytes = model.other_params * served.element_bytes * engines.dp / engines.tp
        rank_bytes = experts_bytes + other_bytes
        layouts, writes = _assignments(trainer, engines)
        return cls(
            full_bytes=full_bytes,
            gathered_bytes=model.params * served.trained_bytes / trainer.pp if trainer.gathers else 0.0,
            rank_bytes=rank_bytes,
            host_bytes=min(full_bytes, rank_bytes * ceil(engines.gpus / topology.engine_hosts)),
            buckets=_buckets(model, served, trainer.ep, bucket_bytes),
            stages=trainer.pp,
            sources=min(trainer.stage_ranks, engines.gpus) * trainer.pp,
            receivers=engines.gpus,
            layouts_per_source=layouts,
            writes_per_layout=writes,
        )


def _buckets(model: ModelSize, served: Served, ep: int, bucket_bytes: int) -> float:
    """Buckets of all stages: of experts whole matrices of all EP ranks, as many as fit, at least one; of the rest full.

    Sizes are those before a conversion to FP8, for that is when buckets are filled.
    """
    buckets = ceil(model.other_params * served.trained_bytes / bucket_bytes)
    gathered_expert = model.one_expert_params * served.trained_bytes * ep
    if not gathered_expert:
        return buckets
    rounds = model.expert_layers * model.experts / ep
    return buckets + sum(rounds / max(1, int(bucket_bytes / (gathered_expert * part))) for part in (2 / 3, 1 / 3))


def _assignments(trainer: TrainerLayout, engines: EngineLayout) -> tuple[int, int]:
    """(layouts, writes of each) of the busiest source of a stage, when each (engine, rank) has one source.

    The first targets get a source each; the others go to one that serves the same engine rank already, the least busy.
    """
    sources = trainer.stage_ranks
    layouts = ceil(engines.tp / sources)
    sharing = max(1, sources // engines.tp)
    return layouts, ceil(engines.engines / min(sharing, engines.engines))
