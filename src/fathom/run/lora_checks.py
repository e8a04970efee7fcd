"""What can be known to be wrong with [lora] before anything heavy starts. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from fathom.config.families import EngineKind, LoraPublish
from fathom.config.lora import LoraConfig
from fathom.config.rollout import EngineConfig
from fathom.core.errors import ConfigError
from fathom.model.lora.peft_config import WEIGHTS_FILE, read_config, why_other_form
from fathom.run.starting_model import StartingModel

_EXPERTS = ("experts.down_proj", "experts.gate_up_proj")
_NEVER = ("embed_tokens", "lm_head", "gate")
_MATRIX = 2
_TINY_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_TINY_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def check_lora(lora: LoraConfig | None, name: str, model: StartingModel, engine: EngineConfig | None) -> None:
    """Targets, the adapter to start from, and whether the engine can compute with what is adapted.

    Args:
        lora: the section. None: there is none, and nothing to check.
        name: of the run, and so of the adapter.
        model: the base.
        engine: which one generates. None: none does.

    Raises:
        ConfigError: something does not fit; says what to change.
    """
    if lora is None:
        return
    _check_targets(lora, adaptable_names(model.folder, model.has_experts))
    if lora.start_from is not None:
        _check_start(lora, Path(lora.start_from), name)
    if engine is not None and engine.kind is EngineKind.VLLM and lora.publish is LoraPublish.ADAPTER:
        _check_vllm(lora, model, engine)


def _check_vllm(lora: LoraConfig, model: StartingModel, engine: EngineConfig) -> None:
    if _adapts_experts(lora, model):
        raise ConfigError(
            "engine.kind = 'vllm' computes no adapters of experts on CPUs (its kernel for them needs Triton); set "
            "lora.publish = 'merged', or lora.target_modules without experts"
        )
    if engine.vllm is not None and engine.vllm.url is not None:
        raise ConfigError(
            "a server at engine.vllm.url was not started with this run's adapter; remove the url, or set "
            "lora.publish = 'merged'"
        )


def adaptable_names(folder: Path | None, has_experts: bool) -> frozenset[str]:
    """Short names and dotted paths of what may be adapted, by the names of a folder's tensors. None: a tiny model.

    Raises:
        ConfigError: the folder cannot be read.
    """
    found: set[str] = set(_EXPERTS if has_experts else ())
    if folder is None:
        modules = _TINY_ATTENTION if has_experts else (*_TINY_ATTENTION, *_TINY_MLP)
        return frozenset(found.union(modules, (name.rpartition(".")[2] for name in modules)))
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    module, _, kind = name.rpartition(".")
                    parts = module.split(".")
                    fixed = kind != "weight" or "experts" in parts or parts[-1] in _NEVER
                    if not fixed and len(file.get_slice(name).get_shape()) == _MATRIX:
                        found |= {".".join(parts[start:]) for start in range(len(parts))}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder} cannot be read: {error}") from error
    return frozenset(found)


def _check_targets(lora: LoraConfig, names: frozenset[str]) -> None:
    if missing := [target for target in lora.target_modules if target not in names]:
        short = sorted({name for name in names if "." not in name or name in _EXPERTS})
        raise ConfigError(
            f"lora.target_modules names {', '.join(missing)}, which this model does not have or which cannot be "
            f"adapted (routers, embedding and output head stay as they are); choose from {', '.join(short)}"
        )


def _check_start(lora: LoraConfig, folder: Path, name: str) -> None:
    """Whether it is for this base shows when the base is loaded; nothing else has started then."""
    config, _ = read_config(folder)
    if why := why_other_form(config, lora.form(name)):
        raise ConfigError(f"lora.start_from = {str(folder)!r}: {why}; set [lora] as it was trained")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"lora.start_from = {str(folder)!r} has no {WEIGHTS_FILE}; is it whole?")


def _adapts_experts(lora: LoraConfig, model: StartingModel) -> bool:
    return model.has_experts and (not lora.target_modules or bool(set(lora.target_modules) & set(_EXPERTS)))
