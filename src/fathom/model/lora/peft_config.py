"""What an adapter's folder in the format of PEFT says of it. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fathom.core.adapter import AdapterForm, AdapterIdentity
from fathom.core.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
"""PEFT's description of the adapter."""
WEIGHTS_FILE = "adapter_model.safetensors"
"""PEFT's tensors."""
IDENTITY_FILE = "fathom_adapter.json"
"""Our description."""


class PeftConfig(msgspec.Struct, frozen=True):
    """What of PEFT's description changes the function."""

    r: int
    """Rank."""
    lora_alpha: float
    """Numerator of the scale."""
    target_modules: tuple[str, ...] | str | None = None
    """What is adapted."""
    target_parameters: tuple[str, ...] | None = None
    """What is adapted without being a module of its own."""
    base_model_name_or_path: str | None = None
    """The base, in words."""
    use_rslora: bool = False
    """The scale is divided by the root of the rank."""
    use_dora: bool = False
    """Magnitudes are trained as well."""
    bias: str = "none"
    """Which biases are trained."""
    rank_pattern: dict[str, int] | None = None
    """Ranks of their own."""
    alpha_pattern: dict[str, float] | None = None
    """Numerators of their own."""
    modules_to_save: tuple[str, ...] | None = None
    """What is trained as a whole."""


def read_config(folder: Path) -> tuple[PeftConfig, AdapterIdentity | None]:
    """What an adapter says of itself, by PEFT's file and by ours. None: it was written by others.

    Raises:
        ConfigError: it is no folder of a LoRA adapter.
    """
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=PeftConfig)
        identity = None
        if (folder / IDENTITY_FILE).exists():
            identity = msgspec.json.decode((folder / IDENTITY_FILE).read_bytes(), type=AdapterIdentity)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder} is no folder of a LoRA adapter in PEFT's format: {error}") from error
    return config, identity


def why_other_form(config: PeftConfig, form: AdapterForm) -> str | None:
    """Why an adapter that says `config` of itself is not of `form`. None: it is."""
    if (
        config.use_dora
        or config.bias != "none"
        or config.rank_pattern
        or config.alpha_pattern
        or config.modules_to_save
    ):
        return "it has more than updates of one rank (DoRA, biases, patterns or whole modules)"
    given = (config.r, config.lora_alpha, config.use_rslora)
    wanted = (form.rank, form.alpha, form.rslora)
    if given != wanted:
        return f"its rank, alpha and rslora are {given}, and [lora] says {wanted}"
    return None
