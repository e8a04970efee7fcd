"""The tokenizers of tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fathom.text.characters import TinyVocabulary, save_character_tokenizer
from fathom.text.chat_bytes import save_chat_bytes_tokenizer

TINY_TOKENIZERS: dict[str, Callable[[Path], TinyVocabulary]] = {
    "arithmetic": save_character_tokenizer,
    "moe": save_character_tokenizer,
    "terminal": save_chat_bytes_tokenizer,
}
"""What writes the tokenizer of each tiny model into a folder."""
