"""The adapter that a run trains, from its options; what engines compute with, and what is published of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fathom.config.families import LoraPublish
from fathom.config.lora import LoraConfig
from fathom.config.run import RunConfig
from fathom.core.adapter import AdapterForm, AdapterIdentity, MergeRounding
from fathom.core.manifest import TensorEntry
from fathom.sync.adapters.adopt import AdapterStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A version on its way out."""

    tensors: Mapping[str, Tensor]
    """What is published, good until the next version is."""
    entries: Sequence[TensorEntry]
    """Their listing, as the step's digest was made of."""
    adapter: AdapterIdentity | None
    """Whose tensors they are. None: a whole model's."""
    merging: MergeRounding | None
    """What was lost in merging an adapter into them. None: nothing was merged."""


def adapter_start(lora: LoraConfig | None, name: str, seed: int, base: str | None) -> AdapterStart | None:
    """What the trainer begins with. None: the whole model is trained.

    Args:
        lora: the run's section. None: there is none.
        name: the run's.
        seed: the run's.
        base: `model.path`. None: a tiny model.
    """
    if lora is None:
        return None
    folder = None if lora.start_from is None else Path(lora.start_from)
    return AdapterStart(form=lora.form(name), seed=seed, folder=folder, base=base or "")


def served_form(config: RunConfig) -> AdapterForm | None:
    """What engines compute with beside the base. None: with whole models."""
    return config.lora.form(config.name) if config.lora is not None and not merges(config) else None


def merges(config: RunConfig) -> bool:
    """Whole models go out, with the adapter merged in."""
    return config.lora is not None and config.lora.publish is LoraPublish.MERGED
