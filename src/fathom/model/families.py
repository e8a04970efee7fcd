"""The model families whose forward is known to be right here, and what in a config would make it wrong."""

from __future__ import annotations

from enum import StrEnum

from transformers import PretrainedConfig

from fathom.core.errors import ConfigError


class ModelFamily(StrEnum):
    """A family of decoders, under the name that its `config.json` has as `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    DEEPSEEK_V3 = "deepseek_v3"


WITH_EXPERTS = frozenset((ModelFamily.QWEN3_MOE, ModelFamily.MIXTRAL, ModelFamily.DEEPSEEK_V3))
"""Families whose layers may have routed experts."""

EXPERTS_IMPLEMENTATION = "grouped_mm"
"""How the experts of a layer are computed: one grouped matrix product over tokens sorted by expert, then each token's
outputs are summed in the order of its own ids, in float32. The alternatives cost more: a Python loop over experts that
sums in the model's dtype in the order of the experts, or a copy of an expert's weights for every token."""


_IGNORED_WHEN_SET = (
    "attention_chunk_size",
    "attention_sinks",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "quantization_config",
    "sliding_window",
)
"""Entries of a config that change the forward of other families; these families' definitions would not notice them."""

_IGNORED_BY_DENSE = ("n_routed_experts", "num_experts", "num_local_experts")
"""Entries that give a model experts; the definitions of dense families would not notice them."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence in a batch: a token would depend on its neighbours."""


def refuse_unsupported(config: PretrainedConfig) -> ModelFamily:
    """The family of a model, if its forward is right here.

    Raises:
        ConfigError: another family, or an entry that our attention or this family's definition would silently ignore.
    """
    name = config.model_type
    if name not in set(ModelFamily):
        raise ConfigError(f"models of type {name!r} are not supported; choose one of {', '.join(ModelFamily)}")
    entries = config.to_dict()
    watched = _IGNORED_WHEN_SET if name in WITH_EXPERTS else (*_IGNORED_WHEN_SET, *_IGNORED_BY_DENSE)
    ignored = [entry for entry in watched if entries.get(entry)]
    if ignored:
        raise ConfigError(f"this {name} model sets {', '.join(ignored)}, which its forward here would ignore")
    windowed = sorted(set(entries.get("layer_types") or ()) - {"full_attention"})
    if windowed:
        raise ConfigError(
            f"this {name} model has layers of type {', '.join(windowed)}; only full attention is computed"
        )
    rope = (entries.get("rope_parameters") or {}).get("rope_type", "default")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"this {name} model has rope_type {rope!r}, whose values depend on the longest sequence in a batch; "
            "choose a fixed one (default, linear, llama3, yarn)"
        )
    return ModelFamily(name)
