"""How large a model is, and how much of it are routed experts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, Self

from fathom.core.errors import ConfigError

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_EXPERT_NAME = re.compile(r"\.experts\.(?:(\d+)\.)?")
_LAYER_NAME = re.compile(r"\.layers\.(\d+)\.")


class Served(StrEnum):
    """Element type in which weights are published."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FP8 = "fp8"

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter. Scales of FP8 blocks (0.1 % of the bytes) are left out."""
        return _ELEMENT_BYTES[self]

    @property
    def trained_bytes(self) -> int:
        """Bytes of one parameter as trainer ranks exchange it: FP8 is made from bfloat16 after the gather."""
        return max(2, self.element_bytes)

    @property
    def fraction_bits(self) -> int:
        """Stored bits of the significand."""
        return _FRACTION_BITS[self]


_ELEMENT_BYTES = {Served.BFLOAT16: 2, Served.FLOAT32: 4, Served.FP8: 1}
_FRACTION_BITS = {Served.BFLOAT16: 7, Served.FLOAT32: 23, Served.FP8: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters of a model, counted."""

    name: str
    """What to call it."""
    other_params: int
    """Parameters outside the routed experts: embeddings, attention, dense and shared feed-forward parts."""
    expert_params: int = 0
    """Parameters of all routed experts of all layers. 0: a dense model."""
    experts: int = 0
    """Routed experts of one layer. 0: a dense model."""
    expert_layers: int = 0
    """Layers that have them."""

    @property
    def params(self) -> int:
        """All parameters."""
        return self.other_params + self.expert_params

    @property
    def one_expert_params(self) -> float:
        """Parameters of one expert of one layer: two thirds are gate and up, one third is down. 0: a dense model."""
        return self.expert_params / (self.experts * self.expert_layers) if self.experts else 0.0

    @classmethod
    def of_path(cls, path: Path) -> Self:
        """Count what a Hugging Face folder holds; without weights in it, or for a config.json, what the config means.

        Raises:
            ConfigError: there is no such folder, or its files say nothing.
        """
        folder = path.parent if path.name == "config.json" else path
        if not folder.is_dir():
            raise ConfigError(f"no model folder {folder}; give a Hugging Face folder or its config.json, or --params")
        weights = [] if path.name == "config.json" else sorted(folder.glob("*.safetensors"))
        if weights:
            return cls._of_weights(folder.name, weights)
        try:
            facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return cls.of_config(facts.get("text_config", facts), folder.name)
        except FileNotFoundError:
            raise ConfigError(f"{folder} has neither *.safetensors nor config.json; give --params instead") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder}/config.json does not say how large the model is ({error!r}); give --params"
            ) from None

    @classmethod
    def of_config(cls, facts: Mapping[str, Any], name: str) -> Self:
        """Count what a transformer of this config.json has. Biases and norms inside attention are left out (< 0.1 %).

        Raises:
            KeyError: an entry is missing that every decoder has.
        """
        hidden, layers = int(facts["hidden_size"]), int(facts["num_hidden_layers"])
        experts = next((int(facts[key]) for key in _EXPERT_COUNTS if facts.get(key)), 0)
        expert_layers = _expert_layers(facts, layers) if experts else 0
        inner = int(facts.get("moe_intermediate_size") or facts["intermediate_size"])
        shared = int(facts.get("shared_expert_intermediate_size") or inner * int(facts.get("n_shared_experts") or 0))
        dense_layers = layers - expert_layers
        dense = 3 * hidden * int(facts["intermediate_size"]) * dense_layers if dense_layers else 0
        embeddings = int(facts["vocab_size"]) * hidden * (1 if facts.get("tie_word_embeddings") else 2)
        beside = expert_layers * (3 * hidden * shared + hidden * experts)
        norms = hidden * (2 * layers + 1)
        return cls(
            name=name,
            other_params=embeddings + layers * _attention(facts, hidden) + dense + beside + norms,
            expert_params=3 * hidden * inner * experts * expert_layers,
            experts=experts,
            expert_layers=expert_layers,
        )

    @classmethod
    def of_params(cls, params: float, name: str | None = None) -> Self:
        """A dense model of that many parameters. Raises ConfigError when that is no size of a model."""
        if not 1 <= params <= 1e15:
            raise ConfigError(f"a model of {params:g} parameters? Give a number from 1 to 1e15, e.g. --params 30e9")
        return cls(name=name or f"{params:.3g} parameters", other_params=int(params))

    @classmethod
    def _of_weights(cls, name: str, files: list[Path]) -> Self:
        expert_params, other_params = 0, 0
        experts: set[int] = set()
        layers: set[int] = set()
        for file in files:
            for tensor, shape in _shapes(file).items():
                found = _EXPERT_NAME.search(tensor)
                if found is None:
                    other_params += prod(shape)
                    continue
                expert_params += prod(shape)
                layers.update(int(layer) for layer in _LAYER_NAME.findall(tensor))
                experts.update(range(shape[0]) if found[1] is None else [int(found[1])])  # fused: experts come first
        return cls(
            name=name,
            other_params=other_params,
            expert_params=expert_params,
            experts=len(experts),
            expert_layers=len(layers),
        )


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shape by tensor, from the header of a safetensors file; no weight is read. Raises ConfigError."""
    try:
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file} is not a safetensors file ({error}); is its download complete?") from None


def _expert_layers(facts: Mapping[str, Any], layers: int) -> int:
    """Layers with experts, as DeepSeek's and Qwen's configs say it."""
    if "first_k_dense_replace" in facts:
        return layers - int(facts["first_k_dense_replace"])
    dense: set[int] = set(facts.get("mlp_only_layers") or ())
    step = int(facts.get("decoder_sparse_step") or 1)
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _attention(facts: Mapping[str, Any], hidden: int) -> int:
    """Parameters of one layer's attention: grouped queries, or latent attention with its indexer."""
    heads = int(facts["num_attention_heads"])
    if not facts.get("kv_lora_rank"):
        head = int(facts.get("head_dim") or hidden // heads)
        return hidden * head * (2 * heads + 2 * int(facts.get("num_key_value_heads") or heads))
    latent, rope, nope = (int(facts[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value, query = int(facts["v_head_dim"]), int(facts.get("q_lora_rank") or 0)
    queries = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
    indexers, index = int(facts.get("index_n_heads") or 0), int(facts.get("index_head_dim") or 0)
    indexer = query * indexers * index + hidden * (index + indexers) if indexers else 0
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden + indexer
