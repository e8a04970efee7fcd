"""Tiny models made from a seed, with a tokenizer of their own: they learn within minutes on a laptop."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from fathom.core.errors import ConfigError

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
_CHARACTERS = "0123456789+-*/=() \n.,:?abcdefghijklmnopqrstuvwxyz"
_MAX_POSITIONS = 256

TINY_NAMES = ("arithmetic",)
"""Models that `make_tiny` can make."""


def make_tiny(name: str, seed: int, folder: Path) -> None:
    """Make a Hugging Face folder: a random model of about 0.6 M parameters and its tokenizer.

    `arithmetic` reads single characters: a prompt is `<bos>` and the characters of its text, e.g. `12+7=` is
    `<bos> 1 2 + 7 =`; an answer ends with `<eos>`. It has no chat template.

    Args:
        name: which model.
        seed: fixes its weights.
        folder: made if missing.

    Raises:
        ConfigError: no such model.
    """
    if name not in TINY_NAMES:
        raise ConfigError(f"no tiny model {name!r}; choose one of {', '.join(TINY_NAMES)}")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *_CHARACTERS])}
    _save_tokenizer(vocabulary, folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=vocabulary[PAD],
        bos_token_id=vocabulary[BOS],
        eos_token_id=vocabulary[EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=vocabulary[BOS], eos_token_id=vocabulary[EOS], pad_token_id=vocabulary[PAD]
    )
    model.save_pretrained(folder)


def _save_tokenizer(vocabulary: dict[str, int], folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel(vocabulary))  # no unknown token: a character it does not know is an error
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": _MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
