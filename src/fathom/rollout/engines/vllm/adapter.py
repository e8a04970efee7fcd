"""The adapter that a vLLM server is started with: one of no effect, in a folder that every commit writes anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from fathom.config.families import Dtype
from fathom.core.adapter import AdapterForm, AdapterIdentity
from fathom.core.errors import ConfigError
from fathom.core.ids import EngineId
from fathom.model.language_model import LanguageModel
from fathom.model.lora.peft_folder import write_adapter
from fathom.rollout.engines.vllm.expected import Form
from fathom.sync.adapters.adopt import AdapterStart, adopt
from fathom.sync.digest import dtype_name

_DTYPES: dict[Dtype, torch.dtype] = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """What versions of a server that computes with an adapter must be."""

    identity: AdapterIdentity
    """Which adapter, and for which base."""
    expected: dict[str, Form]
    """Names and forms of its tensors."""

    @classmethod
    def prepare(cls, model_folder: Path, dtype: Dtype, form: AdapterForm, folder: Path, engine: EngineId) -> Self:
        """Digest the base that the server will load, and write the adapter that it starts with into `folder`.

        Raises:
            ConfigError: the model cannot be loaded, a target is not there, or experts are adapted.
        """
        model = LanguageModel.load(model_folder, _DTYPES[dtype], "cpu")
        identity = adopt(model, AdapterStart(form=form))
        tensors = model.weights()
        if stacked := [name for name, tensor in tensors.items() if tensor.ndim != 2]:
            raise ConfigError(
                f"engine {engine}: vLLM computes no adapters of experts on CPUs, and {stacked[0]} is one; set "
                "lora.publish = 'merged', or lora.target_modules without experts"
            )
        write_adapter(identity, tensors, str(model_folder), folder)
        expected = {name: (dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(identity=identity, expected=expected)
