"""Tiny models made from a seed: they learn within minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from fathom.core.errors import ConfigError

TINY_NAMES = ("arithmetic",)
"""Models that `make_tiny` can make."""


def make_tiny(name: str, seed: int, folder: Path) -> None:
    """Make a random model of about 0.6 M parameters for the tokenizer that lies in `folder`, beside it.

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
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.05,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
