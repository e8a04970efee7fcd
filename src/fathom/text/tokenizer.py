"""What a token id stands for. Needs no model library: the tokenizer's own file is read directly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import tokenizers
from blake3 import blake3

from fathom.core.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files of a Hugging Face folder that a tokenizer is read from; all but the first may be absent."""
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Tokens with a role, as the model folder names them."""

    texts: dict[str, str]
    """Text by role (`bos_token`, ...), for chat templates. A role that is not filled is absent."""
    bos_id: int | None
    """What this tokenizer puts in front of plain text. None: nothing, even where it names a `bos_token`."""
    eos_id: int | None
    """Ends a sequence. None: this tokenizer names none."""
    stop_ids: tuple[int, ...]
    """Ids that end a generation, ascending: `eos_id` and those that `generation_config.json` lists."""


@final
class Tokenizer:
    """Text to ids and back. Special tokens are added by no one but the chat template or the prompt's own code."""

    def __init__(self, core: tokenizers.Tokenizer, special: SpecialTokens, template: str | None) -> None:
        """See `load`."""
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.special = special
        self.template = template
        """The chat template's source. None: there is none."""
        added = core.get_added_tokens_decoder()
        self.special_ids = {token_id: str(token.content) for token_id, token in added.items() if token.special}
        """Text by id of the special tokens: `decode` leaves them out."""
        self.digest = blake3(core.to_str().encode()).hexdigest()
        """BLAKE3 (hex) of the tokenizer's own serialisation."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a Hugging Face folder.

        `tokenizer.json` is required; `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
        `chat_template.jinja` are read where present.

        Raises:
            ConfigError: the folder holds no usable tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model folder {folder} has no tokenizer.json; give a folder with model and tokenizer")
        core = _core(path)
        description = _read(folder / "tokenizer_config.json")
        texts = _special_texts(_read(folder / "special_tokens_map.json") | description, path)
        ids = {role: _id_of(core, text, path) for role, text in texts.items()}
        special = SpecialTokens(
            texts=texts,
            bos_id=_front_id(core, ids.get("bos_token"), description),
            eos_id=ids.get("eos_token"),
            stop_ids=_stop_ids(ids.get("eos_token"), _read(folder / "generation_config.json")),
        )
        return cls(core, special, _template(folder, description))

    @classmethod
    def load_file(cls, path: Path, template: str) -> Self:
        """Read a `tokenizer.json` by any name: a tokenizer that names no roles of its special tokens.

        Raises:
            ConfigError: it is not one.
        """
        return cls(_core(path), SpecialTokens(texts={}, bos_id=None, eos_id=None, stop_ids=()), template)

    def with_template(self, template: str) -> Tokenizer:
        """The same with another chat template."""
        return Tokenizer(self._core, self.special, template)

    def with_special(self, special: SpecialTokens) -> Tokenizer:
        """The same with other tokens in the roles."""
        return Tokenizer(self._core, special, self.template)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id by token, special tokens included."""
        return self._core.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Nothing is added; the written forms of special tokens become these tokens.

        Raises:
            ConfigError: the tokenizer has no token for a character of it.
        """
        try:
            return self._core.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception for a character without a token
            raise ConfigError(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids as a reader sees it: special tokens are left out."""
        return self._core.decode(list(ids), skip_special_tokens=True)

    def decode_token(self, token_id: int) -> str:
        """Text of one id, special tokens written out; a part of a character shows as U+FFFD."""
        return self._core.decode([token_id], skip_special_tokens=False)


def _core(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any malformed file
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _special_texts(description: dict[str, Any], origin: Path) -> dict[str, str]:
    """Texts by role; a token is written as its text or as an object with `content`."""
    texts: dict[str, str] = {}
    for role in _ROLES:
        token = description.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"the tokenizer of {origin.parent} names {token!r} as its {role}; a text is needed")
        if text is not None:
            texts[role] = text
    return texts


def _id_of(core: tokenizers.Tokenizer, text: str, origin: Path) -> int:
    token_id = core.token_to_id(text)
    if token_id is None:
        raise ConfigError(f"{origin} has no token {text!r}, which its folder names as a special token")
    return token_id


def _front_id(core: tokenizers.Tokenizer, bos_id: int | None, description: dict[str, Any]) -> int | None:
    """`bos_id` where encoded plain text begins with it, by `add_bos_token` or else by the tokenizer itself."""
    added = core.encode("").ids[:1] == [bos_id]
    return bos_id if description.get("add_bos_token", added) else None


def _stop_ids(eos_id: int | None, generation: dict[str, Any]) -> tuple[int, ...]:
    listed = generation.get("eos_token_id")
    ids = {eos_id, *(listed if isinstance(listed, list) else [listed])}
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


def _template(folder: Path, description: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = description.get("chat_template")
    if isinstance(template, list):  # several named ones: the conversation's is called default
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
