"""LoRA: train a small update of low rank instead of the whole model."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fathom.config.families import LoraPublish
from fathom.config.section import Section
from fathom.core.adapter import AdapterForm

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
