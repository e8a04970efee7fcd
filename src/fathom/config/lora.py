"""LoRA: train a small update of low rank, or several over one base, instead of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, model_validator

from fathom.config.families import LoraPublish
from fathom.config.section import Section
from fathom.core.adapter import AdapterForm

AdapterName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
_Table = dict[str, JsonValue]
_SHARED = ("trainer.dtype", "trainer.device", "trainer.threads", "lora.publish")
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class LoraConfig(Section):
    """An adapter `y = W x + scale * B (A x)` of each adapted matrix, called by the run's name; the base is frozen. A is
    random by the run's seed, B begins at zero. There is no dropout."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(rank) instead."""
    target_modules: tuple[_Name, ...] = ()
    """What is adapted: last parts of module names, whole words, e.g. `q_proj` or `mlp.down_proj`; experts are
    `experts.gate_up_proj` and `experts.down_proj`. Routers, embedding and output head stay as they are. Empty: all
    linear layers of attention, MLPs and experts."""
    start_from: str | None = Field(default=None, min_length=1)
    """Folder of an adapter in PEFT's format to start from, of this form and for this base. None: a fresh one."""
    publish: LoraPublish = LoraPublish.ADAPTER
    """What engines get."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.target_modules)) < len(self.target_modules):
            raise ValueError(f"target_modules names something twice: {', '.join(self.target_modules)}")
        return self

    def form(self, name: str) -> AdapterForm:
        """The record form of the adapter called `name`; empty targets mean all."""
        return AdapterForm(
            name=name,
            rank=self.rank,
            alpha=self.alpha,
            rslora=self.rslora,
            targets=tuple(sorted(self.target_modules)),
        )


class AdapterConfig(Section):
    """One of several adapters that are trained over one base, each with a task, data order, clock, buffer, books,
    optimizer and history of its own. Options given here stand in place of the run's, key by key. Everything else is the
    run's: model, seed, engine, sync, checkpoints, trackers."""

    task: _Table = Field(default_factory=dict)
    """Options of `[task]`. With another `kind` nothing of the run's `[task.options]` is kept."""
    rollout: _Table = Field(default_factory=dict)
    """Options of `[rollout]`."""
    staleness: _Table = Field(default_factory=dict)
    """Options of `[staleness]`."""
    trainer: _Table = Field(default_factory=dict)
    """Options of `[trainer]`, all but `dtype`, `device` and `threads`."""
    objective: _Table = Field(default_factory=dict)
    """Options of `[objective]`."""
    distillation: _Table = Field(default_factory=dict)
    """Options of `[distillation]`."""
    lora: _Table = Field(default_factory=dict)
    """Options of `[lora]`, all but `publish`."""
    warm_start: _Table = Field(default_factory=dict)
    """Options of `[warm_start]`."""
    evaluation: _Table = Field(default_factory=dict)
    """Options of `[evaluation]`."""

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        own = [f"trainer.{option}" for option in self.trainer] + [f"lora.{option}" for option in self.lora]
        for option in own:
            if option in _SHARED:
                raise ValueError(f"{option} is the same for all adapters over one base; set it for the run")
        return self

    def over(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The plain values of a run with these in their places."""
        return _merged(tree, self.model_dump(exclude_unset=True))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = dict(below)
    if above.get("kind", below.get("kind")) != below.get("kind"):
        merged.pop("options", None)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return merged
