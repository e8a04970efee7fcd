"""An adapter as a folder in the format of PEFT, which most engines and `peft` itself load.

Beside PEFT's two files lies `fathom_adapter.json`: the identity, which says by digest which base it is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError
from fathom.model.lora.peft_config import CONFIG_FILE, IDENTITY_FILE, WEIGHTS_FILE

_PREFIX = "base_model.model."
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\.(lora_[AB])")
_ORDER = ("gate_up_proj", "down_proj")
"""PEFT wraps the experts of a layer once for each of their matrices, in this order; the last one lies outermost."""


def write_adapter(identity: AdapterIdentity, tensors: Mapping[str, Tensor], base: str, folder: Path) -> None:
    """Write an adapter into a folder, which is made.

    Args:
        identity: what it is.
        tensors: by canonical name, on any device.
        base: what PEFT is told of the base: a folder or a hub id.
        folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    form = identity.form
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [target for target in form.targets if not target.startswith("experts.")],
        "target_parameters": [target for target in form.targets if target.startswith("experts.")] or None,
    }
    save_file(
        {_to_peft(name, tensors): _on_disk(name, tensor) for name, tensor in tensors.items()}, folder / WEIGHTS_FILE
    )
    (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(described)))
    (folder / IDENTITY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(identity)))


def read_tensors(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors by canonical name, on the CPU, in the element type of `like`.

    Args:
        folder: an adapter's.
        like: the tensors of an adapter of that form and of the same model.

    Raises:
        ConfigError: names or shapes differ, or the file is damaged.
    """
    try:
        stored = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"adapter {folder} has no readable {WEIGHTS_FILE}: {error}") from error
    names = {_to_peft(name, like): name for name in like}
    missing, unknown = sorted(names.keys() - stored.keys()), sorted(stored.keys() - names.keys())
    if missing or unknown:
        raise ConfigError(
            f"adapter {folder} does not fit this model and [lora]: it lacks {missing[:5]}, and {unknown[:5]} have no "
            "place; set lora.target_modules as it was trained, or choose another base"
        )
    found = {names[key]: _from_disk(names[key], tensor, like[names[key]]) for key, tensor in stored.items()}
    return dict(sorted(found.items()))


def _to_peft(name: str, names: Mapping[str, Tensor]) -> str:
    if found := _EXPERTS.fullmatch(name):
        experts, matrix, part = found.groups()
        wrapped = [each for each in _ORDER if f"{experts}.{each}.{part}" in names]
        inside = len(wrapped) - 1 - wrapped.index(matrix)
        return f"{_PREFIX}{experts}.{'base_layer.' * inside}{part}.weight"
    return f"{_PREFIX}{name}.weight"


def _on_disk(name: str, tensor: Tensor) -> Tensor:
    """PEFT lays the experts' A one below the other, and their B with the expert as the fastest index."""
    tensor = tensor.detach().cpu()
    if tensor.ndim == 3:
        tensor = tensor.flatten(0, 1) if name.endswith("lora_A") else tensor.permute(1, 2, 0).flatten(1)
    return tensor.contiguous()


def _from_disk(name: str, stored: Tensor, like: Tensor) -> Tensor:
    if like.ndim == 3 and stored.numel() == like.numel():
        experts, outputs, rank = like.shape
        if name.endswith("lora_A"):
            stored = stored.reshape(like.shape)
        else:
            stored = stored.reshape(outputs, rank, experts).permute(2, 0, 1)
    if stored.shape != like.shape:
        raise ConfigError(
            f"tensor {name} of the adapter is {list(stored.shape)}, and {list(like.shape)} fits the model"
        )
    return stored.to(like.dtype).contiguous()
