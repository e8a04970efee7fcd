"""What a person says, completed and checked: from numbers of nodes and speeds to a scenario."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fathom.config.families import Dtype, EngineKind
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.engine import ReceivesInto
from fathom.sync.plan.density import WEIGHT_STD, delta_ratio, density
from fathom.sync.plan.estimate import Scenario
from fathom.sync.plan.fabric import (
    DECODE_BYTES_PER_S,
    ENCODE_BYTES_PER_S,
    FABRICS,
    STORAGE_BYTES_PER_S,
    DeltaRates,
    Fabric,
    Storage,
)
from fathom.sync.plan.layout import EngineLayout, Topology, TrainerLayout
from fathom.sync.plan.model_size import ModelSize, Served
from fathom.sync.plan.published import PublishedRow, published_rows

LEARNING_RATE = 1e-6
"""Unless told otherwise."""
_GPUS_PER_NODE = 8
_TINY_PARAMS = {"arithmetic": 600_000, "moe": 3_500_000}
"""About what a tiny model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Parallel sizes, as they are typed. None: 1."""

    tp: int | None = None
    """Tensor parallel."""
    pp: int | None = None
    """Pipeline parallel."""
    cp: int | None = None
    """Context parallel."""
    ep: int | None = None
    """Expert parallel."""
    dp: int | None = None
    """Attention data parallel."""

    @property
    def given(self) -> bool:
        """Anything was said."""
        return any(size is not None for size in (self.tp, self.pp, self.cp, self.ep, self.dp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that can be said. None: what the run, the published row or a default says."""

    model: Path | None = None
    """Hugging Face folder or config.json."""
    params: float | None = None
    """Parameters of a dense model."""
    served: Served | None = None
    """Element type of what is published."""
    trainer_nodes: int | None = None
    """Nodes of the trainer."""
    trainer: Split = Split()
    """How it is split."""
    engines: int | None = None
    """Engines on the trainer's host."""
    engine_nodes: int | None = None
    """Nodes of the engines."""
    engine: Split = Split()
    """How each engine is split."""
    gpus_per_node: int | None = None
    """GPUs of a node. None: 8."""
    fabric: str | None = None
    """A name from `FABRICS`. None: loopback on one host, infiniband-h100 otherwise."""
    link_gbps: float | None = None
    """Gigabits a second of each rank's link, instead of the fabric's."""
    storage_mbps: float | None = None
    """Megabytes a second of the storage."""
    learning_rate: float | None = None
    """Of the optimizer; fixes the density."""
    weight_std: float | None = None
    """Standard deviation of the weights. None: 0.02."""
    density: float | None = None
    """Share of elements that change in a step, instead of the learning rate."""
    delta_ratio: float | None = None
    """Bytes of a delta over full bytes, instead of both."""
    encode_mbps: float | None = None
    """Megabytes a second that a host encodes."""
    decode_mbps: float | None = None
    """Megabytes a second that a host decodes."""
    live: bool = False
    """Engines are written over while they are paused."""


def scenario_of(question: Question, run: RunConfig | None = None, published: str | None = None) -> Scenario:
    """Complete a question.

    Args:
        question: what was said.
        run: a run's config, whose model, host and engines are meant.
        published: name of a published row, whose model and layouts are meant.

    Raises:
        ConfigError: something is missing, impossible or contradicts something else; the message says what to give.
    """
    row = None if published is None else published_row(published)
    if run is not None and row is not None:
        raise ConfigError("give a run's config or --published, not both: each says which model is meant")
    topology = _topology(question, run, row)
    served = question.served or (row.served if row else _run_served(run) if run else Served.BFLOAT16)
    if row is not None:
        receives_into = ReceivesInto.LIVE
    else:
        receives_into = ReceivesInto.STAGING if run is None else _run_receives_into(run)
    return Scenario(
        model=_model(question, run, row),
        served=served,
        topology=topology,
        fabric=_fabric(question, topology),
        storage=Storage(
            bytes_per_s=STORAGE_BYTES_PER_S if question.storage_mbps is None else question.storage_mbps * 1e6
        ),
        delta=_delta(question, run, served),
        receives_into=ReceivesInto.LIVE if question.live else receives_into,
    )


def published_row(name: str) -> PublishedRow:
    """The row of this name. Raises ConfigError."""
    rows = {row.model.name: row for row in published_rows()}
    if name not in rows:
        raise ConfigError(f"nothing was published about {name!r}{_near(name, rows)}. There are: {', '.join(rows)}")
    return rows[name]


def _model(question: Question, run: RunConfig | None, row: PublishedRow | None) -> ModelSize:
    given = [what is not None for what in (question.model, question.params, row)]
    if sum(given) > 1:
        raise ConfigError("the model is said twice; give one of --model, --params and --published")
    if question.model is not None:
        return ModelSize.of_path(question.model)
    if question.params is not None:
        return ModelSize.of_params(question.params)
    if row is not None:
        return row.model
    if run is not None:
        return _run_model(run)
    raise ConfigError("which model? Give --model FOLDER, --params 30e9, --published NAME, or a run's FILE.toml")


def _topology(question: Question, run: RunConfig | None, row: PublishedRow | None) -> Topology:
    placed = (question.trainer_nodes, question.engines, question.engine_nodes, question.gpus_per_node)
    said = any(count is not None for count in placed) or question.trainer.given or question.engine.given
    if said and (row is not None or run is not None):
        raise ConfigError(
            "ranks and nodes are said twice: a run's config and --published have their own; leave out --trainer-..., "
            "--engine-..., --engines and --gpus-per-node, or give --model instead"
        )
    if row is not None:
        return row.topology
    if run is not None:
        return _run_topology(run)
    if question.engine_nodes is None and question.trainer_nodes is None:
        if question.gpus_per_node is not None:
            raise ConfigError(
                "--gpus-per-node says nothing about one host; give --trainer-nodes and --engine-nodes too"
            )
        return _one_host(question)
    if question.engines is not None:
        raise ConfigError("--engines counts engines on the trainer's own host; with nodes, give --engine-nodes only")
    if question.engine_nodes is None or question.trainer_nodes is None:
        missing = "--engine-nodes" if question.engine_nodes is None else "--trainer-nodes"
        raise ConfigError(f"how many nodes on the other side? Give {missing} too, or neither for one host")
    per_node = _GPUS_PER_NODE if question.gpus_per_node is None else question.gpus_per_node
    if min(question.engine_nodes, question.trainer_nodes, per_node) < 1:
        raise ConfigError("--trainer-nodes, --engine-nodes and --gpus-per-node are at least 1")
    return Topology(
        trainer=_trainer(question.trainer, question.trainer_nodes * per_node),
        engines=_engines(question.engine, question.engine_nodes * per_node),
        one_host=False,
        gpus_per_node=per_node,
    )


def _one_host(question: Question) -> Topology:
    split, engine = question.trainer, question.engine
    gpus = (split.pp or 1) * max((split.tp or 1) * (split.cp or 1), split.ep or 1)
    engines = 1 if question.engines is None else question.engines
    return Topology(
        trainer=_trainer(split, gpus),
        engines=_engines(engine, engines * (engine.tp or 1)),
        one_host=True,
    )


def _trainer(split: Split, gpus: int) -> TrainerLayout:
    sizes = {name: 1 if size is None else size for name, size in (("tp", split.tp), ("pp", split.pp), ("cp", split.cp))}
    return TrainerLayout(gpus=gpus, ep=1 if split.ep is None else split.ep, **sizes)


def _engines(split: Split, gpus: int) -> EngineLayout:
    tp, ep, dp = (1 if size is None else size for size in (split.tp, split.ep, split.dp))
    return EngineLayout(gpus=gpus, tp=tp, ep=ep, dp=dp)


def _fabric(question: Question, topology: Topology) -> Fabric:
    name = question.fabric or ("loopback" if topology.one_host else "infiniband-h100")
    if name not in FABRICS:
        raise ConfigError(f"no fabric {name!r}{_near(name, FABRICS)}. There are: {', '.join(FABRICS)}")
    if name == "loopback" and not topology.one_host:
        raise ConfigError(f"loopback is inside one host, and here are {topology.hosts}; use --fabric ethernet-10g")
    fabric = FABRICS[name]
    if question.link_gbps is None:
        return fabric
    if not 1e-3 <= question.link_gbps <= 1e5:
        raise ConfigError(f"a link of {question.link_gbps:g} Gb/s? Give --link-gbps from 0.001 to 100000, e.g. 400")
    rate = question.link_gbps * 1e9 / 8
    return replace(
        fabric,
        name=f"{name} at {question.link_gbps:g} Gb/s",
        gather_bytes_per_s=rate,
        collective_bytes_per_s=rate,
        p2p_bytes_per_s=rate,
    )


def _delta(question: Question, run: RunConfig | None, served: Served) -> DeltaRates:
    for name, value in (("--encode-mbps", question.encode_mbps), ("--decode-mbps", question.decode_mbps)):
        if value is not None and not 1e-3 <= value <= 1e8:
            raise ConfigError(f"{name} {value:g}? Give megabytes a second, e.g. {name} 500")
    return DeltaRates(
        ratio=_ratio(question, run, served),
        encode_bytes_per_s=ENCODE_BYTES_PER_S if question.encode_mbps is None else question.encode_mbps * 1e6,
        decode_bytes_per_s=DECODE_BYTES_PER_S if question.decode_mbps is None else question.decode_mbps * 1e6,
    )


def _run_model(config: RunConfig) -> ModelSize:
    """The policy's size. Raises ConfigError when the model is not on this machine."""
    if config.model.path is None:
        return ModelSize.of_params(_TINY_PARAMS[config.model.tiny or ""], f"tiny {config.model.tiny}")
    if not Path(config.model.path).is_dir():
        raise ConfigError(
            f"model.path = {config.model.path!r} is no folder here, so its size is unknown; download it, or give "
            "--params beside the config"
        )
    return ModelSize.of_path(Path(config.model.path))


def _run_topology(config: RunConfig) -> Topology:
    """One trainer process and `engine.count` engines on one host."""
    engines = EngineLayout(gpus=config.engine.count)
    return Topology(trainer=TrainerLayout(gpus=1), engines=engines, one_host=True)


def _run_served(config: RunConfig) -> Served:
    """Element type of what it publishes."""
    return Served.BFLOAT16 if config.trainer.dtype is Dtype.BFLOAT16 else Served.FLOAT32


def _run_receives_into(config: RunConfig) -> ReceivesInto:
    """Where its engines are written to: the embedded and the scripted one have a second weight set."""
    return ReceivesInto.LIVE if config.engine.kind is EngineKind.VLLM else ReceivesInto.STAGING


def _ratio(question: Question, run: RunConfig | None, served: Served) -> float:
    """What was said, or what follows from it: from a density, or from learning rate and weights."""
    by_rate = question.learning_rate is not None or question.weight_std is not None
    if sum((by_rate, question.density is not None, question.delta_ratio is not None)) > 1:
        raise ConfigError("what changes is said twice; give one of --delta-ratio, --density, or --lr with --weight-std")
    if question.delta_ratio is not None:
        return question.delta_ratio
    if question.density is not None:
        return delta_ratio(question.density, served)
    default = LEARNING_RATE if run is None else run.trainer.optimizer.lr
    rate = default if question.learning_rate is None else question.learning_rate
    std = WEIGHT_STD if question.weight_std is None else question.weight_std
    return delta_ratio(density(rate, served, std), served)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
