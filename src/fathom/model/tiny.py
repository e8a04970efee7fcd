"""Tiny models made from a seed: they learn within minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, Qwen3MoeConfig

from fathom.core.errors import ConfigError

_CONFIGS: dict[str, tuple[type[Any], dict[str, int | bool]]] = {
    "arithmetic": (
        LlamaConfig,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "moe": (
        Qwen3MoeConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "terminal": (
        LlamaConfig,
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
TINY_NAMES = tuple(_CONFIGS)
"""Models that `make_tiny` can make: dense ones of about 0.6 M and 0.8 M parameters, one with experts of about 3 M."""


def make_tiny(name: str, seed: int, folder: Path) -> None:
    """Make a random model for the tokenizer that lies in `folder`, beside it.

    The seed alone fixes the weights; torch's own random state is left as it was.

    Args:
        name: which model.
        seed: fixes its weights.
        folder: a tokenizer's; it becomes a Hugging Face model folder.

    Raises:
        ConfigError: no such model, or no tokenizer in `folder`.
    """
    if name not in TINY_NAMES:
        raise ConfigError(f"no tiny model {name!r}; choose one of {', '.join(TINY_NAMES)}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: a tiny model is made for a tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    kind, sizes = _CONFIGS[name]
    config = kind(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.05,
        tie_word_embeddings=True,
        **sizes,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
