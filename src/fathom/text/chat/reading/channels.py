"""Answers of several messages, each with a header that says what it is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import final

from fathom.text.chat.reading.calls import Named, Part, Spoken, Thought, Written, find_first, held
from fathom.text.chat.reading.written import ChannelCalls

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


@final
class ChannelAnswer:
    """Reads an answer: what is analysed is a thought, what is addressed to a tool a call, and all else is said."""

    def __init__(self, written: ChannelCalls, *, calls: bool) -> None:
        """`calls`: tools may be called."""
        self._written = written
        self._calls = calls
        self._text = ""
        self._tell: Callable[[str], Part] | None = None

    def feed(self, text: str) -> list[Part]:
        """Read on."""
        self._text += text
        return self._run(final=False)

    def end(self) -> list[Part]:
        """What was held back."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Part]:
        events: list[Part] = []
        while self._text:
            before = self._text
            events += self._header(final) if self._tell is None else self._body(final)
            if self._text == before:
                break
        return events

    def _header(self, final: bool) -> list[Part]:
        header, mark, body = self._text.partition(self._written.message)
        if not mark:
            if not final:
                return []
            self._text = ""
            plain = header.strip() and self._written.channel not in header and self._written.start not in header
            return [Spoken(header)] if plain else []
        self._text = body
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._calls and recipient[1] not in ("assistant", "user"):
            self._tell = Written
            return [Named(recipient[1])]
        channel = header.rpartition(self._written.channel)[2].strip()
        self._tell = Thought if channel.startswith("analysis") and recipient is None else Spoken
        return []

    def _body(self, final: bool) -> list[Part]:
        assert self._tell is not None
        tell = self._tell
        marks = [*self._written.ends, self._written.start]
        found = find_first(self._text, marks)
        if found is not None:
            place, mark = found
            said, self._text, self._tell = self._text[:place], self._text[place + len(mark) :], None
            return [tell(said)] if said else []
        ready = len(self._text) - (0 if final else held(self._text, marks))
        said, self._text = self._text[:ready], self._text[ready:]
        return [tell(said)] if said else []
