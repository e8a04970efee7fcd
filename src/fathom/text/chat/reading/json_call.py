"""Calls written as one JSON object, between tags or bare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, final

from fathom.text.chat.reading.calls import Event, Named, Spoken, Step, Written, find_first, held
from fathom.text.chat.reading.json_value import JsonValue
from fathom.text.chat.reading.written import JsonCalls

_FIRST_KEY = re.compile(r'\s*(?:\{\s*(?:"(?:([^"\\]*)(")?)?)?)?')


@final
class JsonCall:
    """Reads one call. The arguments stream where the name comes first; elsewhere they are told when it is over."""

    def __init__(self, written: JsonCalls, tools: frozenset[str]) -> None:
        """`tools`: known names. They matter to bare objects only, which may be something else than a call."""
        self._written = written
        self._tools = tools
        name = rf'\s*\{{\s*"{re.escape(written.name_key)}"\s*:\s*"([^"\\]+)"'
        self._name = re.compile(name)
        self._whole_front = re.compile(rf'{name}\s*,\s*"{re.escape(written.arguments_key)}"\s*:\s*(?=\S)')
        self._arguments = re.compile(rf'\s*,\s*"{re.escape(written.arguments_key)}"\s*:\s*(?=\S)')
        self._bare = not written.opens
        self._marks = tuple(mark for mark in (written.closes, written.opens) if mark)
        self._state: Callable[[str, bool], Step] = self._open
        self._value = JsonValue(self._marks)
        self._object = JsonValue(())
        self._raw = ""
        self._scanned = 0
        self._string = ""

    def step(self, text: str, *, final: bool) -> Step:
        """See `CallReader`."""
        events: list[Event] = []
        while True:
            state = self._state
            step = state(text, final)
            events += step.events
            if step.done or (step.rest == text and self._state == state):
                return Step(events, step.rest, step.done)
            text = step.rest

    # In front of the name -----------------------------------------------------------------------------------------

    def _open(self, text: str, final: bool) -> Step:
        opens = self._written.opens
        body = text.removeprefix(opens)
        if self._bare and not self._may_be_call(body):
            return Step([Spoken(text)], "", done=True)
        closed = find_first(body, self._marks)
        found = self._name.match(body)
        if found is not None and (closed is None or found.end() <= closed[0]):
            certain = not self._bare or found[1] in self._tools or self._whole_front.match(body) is not None
            if certain:
                self._state = self._between
                return Step([Named(found[1])], body[found.end() :], done=False)
        return self._whole(text, body, final)

    def _may_be_call(self, body: str) -> bool:
        """A bare object whose first key is one of a call's; more may have to come."""
        found = _FIRST_KEY.match(body)
        if found is None or (found.end() < len(body) and not found[2]):
            return False
        keys = (self._written.name_key, self._written.arguments_key, "type")
        return found[1] in keys if found[2] else any(key.startswith(found[1] or "") for key in keys)

    def _whole(self, text: str, body: str, final: bool) -> Step:
        """A call that is not told before it is over: its name is not where it should be."""
        end = self._end_of(body, final)
        if end is None:
            return Step([], text, done=False)
        inner, rest = body[: end[0]], body[end[0] + end[1] :]
        raw = text[: len(text) - len(rest)]
        return Step(self._told(inner, raw), rest, done=True)

    def _end_of(self, body: str, final: bool) -> tuple[int, int] | None:
        """Where the call's text ends, and how long the mark is that ends it. None: not yet."""
        if not self._bare:
            found = find_first(body, self._marks)
            if found is not None:
                return found[0], len(found[1]) if found[1] == self._written.closes else 0
        else:
            taken, ended = self._object.scan(body[self._scanned :], final=final)
            self._scanned += taken
            if ended:
                return self._scanned, 0
        return (len(body), 0) if final else None

    def _told(self, inner: str, raw: str) -> list[Event]:
        value = _loaded(inner)
        name = value.get(self._written.name_key) if isinstance(value, dict) else None
        if isinstance(name, str) and name:
            arguments = value.get(self._written.arguments_key)
            if self._bare and name not in self._tools and arguments is None:
                return [Spoken(raw)]
            written = "{}" if arguments is None else _as_text(arguments)
            return [Named(name), *([Written(written)] if written else [])]
        found = re.search(rf'"{re.escape(self._written.name_key)}"\s*:\s*"([^"\\]+)"', inner)
        if found is None or self._bare:
            return [Spoken(raw)]
        return [Named(found[1]), Written(inner.strip())]

    # Behind it ----------------------------------------------------------------------------------------------------

    def _between(self, text: str, final: bool) -> Step:
        """In front of the arguments."""
        found = self._arguments.match(text)
        if found is not None:
            self._state = self._within
            return Step([], text[found.end() :], done=False)
        if re.match(r"\s*\}", text):
            self._state = self._after
            return Step([Written("{}")], text, done=False)
        end = find_first(text, self._marks)
        if end is None and not final:
            return Step([], text, done=False)
        inner = text if end is None else text[: end[0]]
        self._state = self._after
        value = _loaded('{"": ""' + inner)
        known = isinstance(value, dict) and self._written.arguments_key in value
        told = _as_text(value[self._written.arguments_key]) if known else inner.strip()
        return Step([Written(told)] if told else [], text[len(inner) :], done=final and end is None)

    def _within(self, text: str, final: bool) -> Step:
        taken, ended = self._value.scan(text, final=final)
        part = text[:taken]
        if self._value.is_text:
            self._string += part
            events = [Written(_unquoted(self._string))] if ended or final else []
            events = [event for event in events if event.text]
        else:
            events = [Written(part)] if part else []
        if ended:
            self._state = self._after
        return Step(events, text[taken:], done=final and not ended)

    def _after(self, text: str, final: bool) -> Step:
        """Whatever follows the arguments is not told, up to the call's end."""
        if self._bare:
            found = re.match(r"\s*\}", text)
            if found is not None:
                return Step([], text[found.end() :], done=True)
            return Step([], text, done=final or bool(text.strip()))
        found = find_first(text, self._marks)
        if found is not None:
            place, mark = found
            return Step([], text[place + (len(mark) if mark == self._written.closes else 0) :], done=True)
        keep = 0 if final else held(text, self._marks)
        return Step([], text[len(text) - keep :], done=final)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _unquoted(text: str) -> str:
    value = _loaded(text)
    return value if isinstance(value, str) else text
