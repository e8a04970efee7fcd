"""Calls whose name and JSON arguments stand between marks."""

from __future__ import annotations

from typing import final

from fathom.text.chat.reading.calls import Event, Named, Spoken, Step, Written, find_first, held
from fathom.text.chat.reading.written import MarkedCalls


@final
class MarkedCall:
    """Reads one call; arguments stream."""

    def __init__(self, written: MarkedCalls) -> None:
        """Nothing read yet."""
        self._written = written
        self._named = False
        self._told = False

    def step(self, text: str, *, final: bool) -> Step:
        """See `CallReader`."""
        events: list[Event] = []
        if not self._named:
            named = self._name(text, final)
            if not self._named:
                return named
            events, text = list(named.events), named.rest
        return self._body(events, text, final)

    def _name(self, text: str, final: bool) -> Step:
        body = text.removeprefix(self._written.all_open).lstrip().removeprefix(self._written.opens)
        ends = [self._written.closes, self._written.all_close, self._written.opens]
        found = find_first(body, [self._written.between, *ends])
        if found is None and not final:
            return Step([], text, done=False)
        place, mark = found if found is not None else (len(body), "")
        name, rest = body[:place].strip(), body[place:]
        if mark == self._written.between:
            rest = rest.removeprefix(mark).lstrip()
        elif not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
            # without its mark, the arguments follow the name on the next line or at once
            place = min((at for at in (name.find("\n"), name.find("{")) if at >= 0), default=len(name))
            name, arguments = name[:place].strip(), name[place:].strip().removeprefix("```json").strip()
            rest = arguments + rest
        if not name:
            rest = rest.removeprefix(self._written.closes)
            return Step([Spoken(text[: len(text) - len(rest)])], rest, done=True)
        self._named = True
        return Step([Named(name)], rest, done=False)

    def _body(self, events: list[Event], text: str, final: bool) -> Step:
        marks = [self._written.closes, self._written.all_close, self._written.opens]
        text = text if self._told else text.lstrip()
        found = find_first(text, marks)
        if found is not None:
            place, mark = found
            arguments = text[:place].rstrip()
            rest = text[place + len(mark) :] if mark == self._written.closes else text[place:]
            return Step([*events, *([Written(arguments)] if arguments else [])], rest, done=True)
        keep = 0 if final else held(text, [mark for mark in marks if mark])
        ready = text[: len(text) - keep].rstrip()
        self._told = self._told or bool(ready)
        rest = "" if final else text[len(ready) :]
        return Step([*events, *([Written(ready)] if ready else [])], rest, done=final)
