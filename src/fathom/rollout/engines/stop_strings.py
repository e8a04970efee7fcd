"""When does a text end? Sampled ids become text one by one, and the token that completes a stop string is the last.

Ids are never cut nor encoded again: what a stop string takes away, it takes from the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

Decode = Callable[[list[int]], str]
"""Text of ids as a reader sees it: special tokens are left out."""

UNFINISHED = "\ufffd"
"""How a decoder shows bytes that are no character (yet). A stop string cannot contain it."""

_WINDOW, _CONTEXT, _HOPELESS = 32, 8, 256
"""Ids decoded at once before the oldest are dropped, how many are left then, and when a text without an end of a
character is cut anywhere: a character has at most four bytes, and what a token looks like depends on few before it."""


@final
class StopMatcher:
    """Follows one generation. The prompt is no part of the text."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        """`strings`: at least one, none empty."""
        self._decode = decode
        self._strings = tuple(strings)
        self._reach = max(map(len, strings)) - 1
        self._ids: list[int] = []
        self._text = ""
        """Text of `_ids` that cannot change any more."""
        self._tail = ""
        """The last `_reach` characters of the whole text: where a match can begin."""
        self._ends: list[int] = []
        """Numbers of leading `_ids` after which a character was complete."""

    def push(self, token_id: int) -> str | None:
        """Add a sampled token. Returns the stop string that it completes (the leftmost one), or None."""
        self._ids.append(token_id)
        shown = self._decode(self._ids)
        text = shown.rstrip(UNFINISHED)
        recent = self._tail + text[len(self._text) :]
        found = first_stop(recent, self._strings)
        self._tail = recent[-self._reach :] if self._reach else ""
        if len(text) > len(self._text):
            self._text = text
        if len(text) == len(shown):
            self._ends.append(len(self._ids))
            if len(self._ids) >= _WINDOW:
                self._forget(max((end for end in self._ends if end <= len(self._ids) - _CONTEXT), default=0))
        elif len(self._ids) >= _HOPELESS:
            self._forget(len(self._ids) - _CONTEXT)
        return found[1] if found is not None else None

    def _forget(self, count: int) -> None:
        """Drop the oldest ids."""
        self._ids = self._ids[count:]
        self._ends = [end - count for end in self._ends if end > count]
        self._text = self._decode(self._ids).rstrip(UNFINISHED)


def first_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Where the leftmost stop string begins, and which it is (the longest, of several there). None: there is none."""
    found = [(place, -len(stop), stop) for stop in strings if (place := text.find(stop)) >= 0]
    if not found:
        return None
    place, _, stop = min(found)
    return place, stop
