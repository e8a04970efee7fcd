"""Calls whose arguments have tags of their own, their values written as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, final

from fathom.text.chat.reading.calls import Event, Named, Spoken, Step, Written, find_first, may_begin
from fathom.text.chat.reading.written import TaggedCalls


@final
class TaggedCall:
    """Reads one call. Arguments are told one by one, as the JSON object that they make up."""

    def __init__(self, written: TaggedCalls, types: Mapping[str, Mapping[str, str]]) -> None:
        """`types`: JSON type of each parameter, by tool and parameter, where one is known."""
        self._written = written
        self._types = types
        self._name = ""
        self._told = 0
        self._searched = 0
        gap = r"\s*".join(map(re.escape, written.value_opens.split()))
        self._argument = re.compile(
            rf"\s*{re.escape(written.key_opens)}(.*?){gap}(.*?){re.escape(written.value_closes)}", re.DOTALL
        )
        self._begun = re.compile(rf"\s*{re.escape(written.key_opens)}(.*?){gap}(.*)\Z", re.DOTALL)

    def step(self, text: str, *, final: bool) -> Step:
        """See `CallReader`."""
        events: list[Event] = []
        if not self._name:
            named = self._named(text, final)
            if not self._name:
                return named
            events, text = list(named.events), named.rest
        while True:
            step = self._next(text, final)
            events += step.events
            if step.done or step.rest == text:
                return Step(events, step.rest, step.done)
            text = step.rest

    def _named(self, text: str, final: bool) -> Step:
        written = self._written
        body = text.removeprefix(written.opens)
        front = body.lstrip()
        if may_begin(front, written.name_opens) and not final:
            return Step([], text, done=False)
        front = front.removeprefix(written.name_opens).lstrip()
        ends = [written.name_closes or "\n", written.key_opens, written.closes, written.opens]
        found = find_first(front, ends)
        if found is None and not final:
            return Step([], text, done=False)
        place, mark = found if found is not None else (len(front), "")
        name, rest = front[:place].strip(), front[place:]
        if mark == written.name_closes:
            rest = rest.removeprefix(mark)
        if not name or len(name.split()) > 1:
            rest = rest.removeprefix(written.closes)
            return Step([Spoken(text[: len(text) - len(rest)])], rest, done=True)
        self._name = name
        return Step([Named(name)], rest, done=False)

    def _next(self, text: str, final: bool) -> Step:
        """One argument, or the end."""
        written = self._written
        front = text.lstrip()
        if front.startswith(written.key_opens):
            # a long value is not searched again from its beginning with each token of it
            closed = text.find(written.value_closes, max(0, self._searched - len(written.value_closes))) >= 0
            found = self._argument.match(text) if closed else None
            self._searched = len(text) if found is None else 0
            if found is not None:
                return Step([Written(self._pair(found[1], found[2]))], text[found.end() :], done=False)
            return self._cut(text) if final else Step([], text, done=False)
        end = find_first(text, [written.closes, written.opens, written.key_opens])
        if end is not None and end[1] == written.key_opens:
            return Step([], text[end[0] :], done=False)
        if end is not None:
            rest = text[end[0] :].removeprefix(written.closes)
            return Step([Written("}" if self._told else "{}")], rest, done=True)
        if not final:
            return Step([], text, done=False)
        if front.startswith("</"):  # it closed what was open, but not all of it
            return Step([Written("}" if self._told else "{}")], "", done=True)
        return Step([] if self._told else [Written("{")], "", done=True)

    def _cut(self, text: str) -> Step:
        """The answer ended within an argument: what there is of it, and no object."""
        found = self._begun.match(text)
        key, value = ("", "") if found is None else map(_quoted, found.groups())
        return Step([Written(f"{', ' if self._told else '{'}{key}{': ' * bool(key)}{value[:-1]}")], "", done=True)

    def _pair(self, key: str, value: str) -> str:
        key = key.strip()
        if self._written.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        front = ", " if self._told else "{"
        self._told += 1
        kind = self._types.get(self._name, {}).get(key, "")
        return f"{front}{_quoted(key)}: {json.dumps(_typed(value, kind), ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(value: str, kind: str) -> Any:
    """Text where text is wanted; elsewhere what it is as JSON. Python's own spelling of constants is understood too."""
    if kind == "string":
        return value
    spelled = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return json.loads(spelled)
    except (ValueError, RecursionError):
        return value
