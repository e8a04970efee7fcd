"""Where a JSON value ends that arrives bit by bit, and may be broken."""

from __future__ import annotations

from typing import final

from fathom.text.chat.reading.calls import may_begin


@final
class JsonValue:
    """Finds the end of one value: the bracket that closes it, the quote that ends it, or what follows a bare word."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops`: marks that end the value wherever they stand outside of a string. The value may be broken then."""
        self._stops = stops
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._kind = ""

    @property
    def is_text(self) -> bool:
        """The value is a JSON string."""
        return self._kind == '"'

    def scan(self, text: str, *, final: bool) -> tuple[int, bool]:
        """How many characters of `text` belong to the value, and whether it ends there. Scan on with what is left."""
        for place, letter in enumerate(text):
            if self._quoted:
                if self._in_string(letter):
                    return place + 1, True
                continue
            begun = [stop for stop in self._stops if stop and stop[0] == letter]
            if any(text.startswith(stop, place) for stop in begun):
                return place, True
            if not final and any(may_begin(text[place:], stop) for stop in begun):
                return place, False
            if self._kind == "word" and letter in ",}] \t\r\n":
                return place, True
            if self._outside(letter):
                return place + 1, True
        return len(text), False

    def _in_string(self, letter: str) -> bool:
        """True: the value ends with it."""
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._quoted = False
            return self._kind == '"'
        return False

    def _outside(self, letter: str) -> bool:
        """True: the value ends with it."""
        if not self._kind and letter.isspace():
            return False
        if not self._kind:
            self._kind = letter if letter in '{["' else "word"
        if letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth <= 0 and self._kind != "word"
        return False
