"""A tokenizer of single characters, for tiny models that are made from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
_MAX_POSITIONS = 256
_CHARACTERS = "0123456789+-*/=() \n.,:?abcdefghijklmnopqrstuvwxyz"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TinyVocabulary:
    """What a model for this tokenizer must fit."""

    size: int
    """Number of tokens."""
    max_positions: int
    """Longest sequence."""


def save_character_tokenizer(folder: Path) -> TinyVocabulary:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`.

    A prompt is `<bos>` and the characters of its text, e.g. `12+7=` is `<bos> 1 2 + 7 =`; an answer ends with
    `<eos>`. A character that it does not know is an error, never a silent "unknown". There is no chat template.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *_CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary))
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
    return TinyVocabulary(size=len(vocabulary), max_positions=_MAX_POSITIONS)
