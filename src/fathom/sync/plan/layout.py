"""Who holds what: trainer ranks, engine ranks, and where they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from fathom.core.errors import ConfigError

_LARGEST = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """How the trainer's copy is split. Ranks beyond the product of the splits are data parallel."""

    gpus: int
    """Ranks."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallel size: copies, as data parallel ones are."""
    ep: int = 1
    """Expert parallel size."""

    def __post_init__(self) -> None:
        _check_counts(self, "trainer")
        _check_divides("trainer", f"TP {self.tp} x PP {self.pp} x CP {self.cp}", self.tp * self.pp * self.cp, self.gpus)
        _check_divides("trainer", f"EP {self.ep} within one of {self.pp} stages", self.ep, self.gpus // self.pp)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage: after a gather each of them holds the stage whole."""
        return self.gpus // self.pp

    @property
    def gathers(self) -> bool:
        """No rank holds a whole tensor of every kind: they are gathered first."""
        return self.tp > 1 or self.ep > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How engines split their copies."""

    gpus: int
    """Ranks of all engines."""
    tp: int = 1
    """Ranks of one engine, over which its tensors are split."""
    ep: int = 1
    """Ranks over which its experts are spread; with fewer than `tp`, each expert is split over the rest."""
    dp: int = 1
    """Copies that one engine keeps of everything but the experts (attention data parallel)."""

    def __post_init__(self) -> None:
        _check_counts(self, "engine")
        _check_divides("engine", f"TP {self.tp}", self.tp, self.gpus)
        _check_divides("engine", f"EP {self.ep}", self.ep, self.tp)
        _check_divides("engine", f"DP {self.dp}", self.dp, self.tp)

    @property
    def engines(self) -> int:
        """Engines."""
        return self.gpus // self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Both, and where they are."""

    trainer: TrainerLayout
    """The trainer."""
    engines: EngineLayout
    """The engines."""
    one_host: bool
    """Trainer and engines share one host. False: they share none."""
    gpus_per_node: int = 8
    """Ranks of one node."""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"{self.gpus_per_node} GPUs on a node? Set --gpus-per-node to at least 1")

    @property
    def engine_hosts(self) -> int:
        """Hosts with engines."""
        return 1 if self.one_host else ceil(self.engines.gpus / self.gpus_per_node)

    @property
    def trainer_hosts(self) -> int:
        """Hosts with trainer ranks."""
        return 1 if self.one_host else ceil(self.trainer.gpus / self.gpus_per_node)

    @property
    def hosts(self) -> int:
        """All hosts."""
        return 1 if self.one_host else self.trainer_hosts + self.engine_hosts


def _check_counts(layout: TrainerLayout | EngineLayout, who: str) -> None:
    for name, value in asdict(layout).items():
        if not 1 <= value <= _LARGEST:
            raise ConfigError(f"{who}: {name} = {value}; give a number from 1 to {_LARGEST:,}")


def _check_divides(who: str, what: str, part: int, whole: int) -> None:
    if whole % part:
        near = f"{max(whole // part, 1) * part} or {(whole // part + 1) * part}"
        raise ConfigError(
            f"{who}: {what} = {part} does not divide {whole} ranks; change the split, or use {near} ranks"
        )
