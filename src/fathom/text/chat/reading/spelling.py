"""Ids to text as they arrive: whole characters only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from fathom.text.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_HELD = 3
"""Marks of a damaged character that may still become one: it has at most four bytes."""
_WINDOW = 48
"""Ids that wait for a character's end before the oldest are let go."""


@final
class Spelling:
    """Spells one answer. What it gives, joined, is what the tokenizer makes of all ids between two special tokens."""

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str]) -> None:
        """`shown`: text of special ids that are written out. Other special ids are left out."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._special = tokenizer.special_ids
        self._front: list[int] = []
        self._waiting: list[int] = []
        self._front_length = 0
        self._told = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """What these ids make known."""
        return "".join(map(self._one, token_ids))

    def end(self) -> str:
        """What was held back."""
        if not self._waiting:
            return ""
        text = self._text()[self._told :]
        self._front, self._waiting, self._front_length, self._told = [], [], 0, 0
        return text

    def _one(self, token_id: int) -> str:
        if token_id in self._special or token_id in self._shown:
            return self.end() + self._shown.get(token_id, "")
        self._waiting.append(token_id)
        text = self._text()
        ready = len(text)
        while ready > self._told and text[ready - 1] == _UNFINISHED and len(text) - ready < _HELD:
            ready -= 1
        new = text[self._told : ready]
        if ready == len(text):  # a whole character: what follows is spelled behind these ids only
            self._front, self._waiting = self._waiting, []
            self._front_length, self._told = len(self._tokenizer.decode(self._front)), 0
        elif len(self._waiting) > _WINDOW:
            held = len(text) - ready
            self._front, self._waiting = [], self._waiting[-2 * _HELD :]
            self._front_length = 0
            self._told = max(0, len(self._text()) - held)
        else:
            self._told = max(self._told, ready)
        return new

    def _text(self) -> str:
        return self._tokenizer.decode([*self._front, *self._waiting])[self._front_length :]
