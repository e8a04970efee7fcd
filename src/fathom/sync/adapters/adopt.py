"""Give a model an adapter, and find out which one it is: by form, and by the digest of the base under it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fathom.core.adapter import AdapterForm, AdapterIdentity
from fathom.core.errors import ConfigError
from fathom.model.language_model import LanguageModel
from fathom.model.lora.peft_config import read_config, why_other_form
from fathom.model.lora.peft_folder import read_tensors
from fathom.sync.digest import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStart:
    """An adapter to begin with."""

    form: AdapterForm
    """Its form; empty targets mean all."""
    seed: int = 0
    """Fixes A of a fresh one."""
    folder: Path | None = None
    """Folder in PEFT's format with the numbers to begin with. None: a fresh one, which changes nothing yet."""
    base: str = ""
    """What the base is called: by this alone an adapter that was made elsewhere says which base it is for."""


def adopt(model: LanguageModel, start: AdapterStart) -> AdapterIdentity:
    """Compute with an adapter beside the model's weights, which are frozen and digested.

    Raises:
        ConfigError: a target is not there; or the adapter to start from is of another form or for another base.
    """
    base = digest(model.base_weights(), threads=torch.get_num_threads())
    identity = AdapterIdentity(form=model.adapt(start.form, start.seed), base=base)
    if start.folder is not None:
        _refuse_other(start.folder, start.base, identity)
        model.use({name: each.to(model.device) for name, each in read_tensors(start.folder, model.weights()).items()})
    return identity


def _refuse_other(folder: Path, base: str, identity: AdapterIdentity) -> None:
    config, given = read_config(folder)
    if why := why_other_form(config, identity.form):
        raise ConfigError(f"lora.start_from = {str(folder)!r}: {why}; set [lora] as it was trained")
    if given is not None and given.base != identity.base:
        raise ConfigError(
            f"lora.start_from = {str(folder)!r} is an adapter for another base: it was trained on weights with the "
            f"digest {given.base}, and those of model.path in trainer.dtype have {identity.base}; start from the model "
            "and element type that it was trained on"
        )
    if given is None and config.base_model_name_or_path != base:
        raise ConfigError(
            f"lora.start_from = {str(folder)!r} says that it is for {config.base_model_name_or_path!r}, and model.path "
            f"is {base!r}; set base_model_name_or_path in its adapter_config.json if they are the same weights"
        )
