"""A Hugging Face folder made from published weights: what any other program can load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fathom.core.errors import ConfigError, PayloadError
from fathom.model.language_model import LanguageModel


def write_model(config: bytes, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write config and weights (safetensors) into an existing folder, in the layout that `transformers` gives a model.

    Names and layout on disk may differ from those published (experts lie apart there); `read_model` undoes that.

    Args:
        config: the model's `config.json`; its element type becomes that of the weights.
        weights: on a CPU, under their canonical names, tied names resolved to one.
        folder: where to.

    Raises:
        ConfigError: it is no config of a model that is known here.
        PayloadError: a tensor has no place in that model, or another shape.
    """
    (folder / "config.json").write_bytes(config)
    try:
        described: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):  # no memory and no random numbers for what is replaced
            model: Any = AutoModelForCausalLM.from_config(described, dtype=served_dtype(weights))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"this is no config.json of a causal language model: {error}") from error
    try:
        report = model.load_state_dict(dict(weights), strict=False, assign=True)
    except RuntimeError as error:
        raise PayloadError(f"these weights are not of the model that its config.json describes: {error}") from error
    if report.unexpected_keys:
        raise PayloadError(f"these weights have no place in the model of its config.json: {report.unexpected_keys[:5]}")
    model.tie_weights()
    if absent := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise PayloadError(f"the model of its config.json has tensors that these weights lack: {absent[:5]}")
    model.save_pretrained(folder)


def read_model(folder: Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The weights in a Hugging Face folder as both users of the forward name them. Raises ConfigError."""
    return LanguageModel.load(folder, dtype, "cpu").weights()


def served_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The element type that most of the weights have."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]
