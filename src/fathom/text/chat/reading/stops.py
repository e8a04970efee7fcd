"""Text up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from fathom.text.chat.reading.calls import find_first, held


@final
class Stops:
    """Lets text through until a stop string begins; what may be the beginning of one waits."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Texts that end an answer."""
        self._stops = [stop for stop in stop_strings if stop]
        self._text = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        """What is certain to stand in front of any stop string."""
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        self._text += text
        found = find_first(self._text, self._stops)
        if found is not None:
            self._stopped = True
            return self._text[: found[0]]
        ready = len(self._text) - held(self._text, self._stops)
        text, self._text = self._text[:ready], self._text[ready:]
        return text

    def end(self) -> str:
        """What waited."""
        return "" if self._stopped else self._text
