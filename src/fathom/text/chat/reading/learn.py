"""How a template writes thoughts and calls, found by letting it write some that are known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from fathom.core.errors import DataError
from fathom.core.records.message import Message, Role, ToolCall
from fathom.text.chat.reading.written import (
    CallsWritten,
    ChannelCalls,
    JsonCalls,
    MarkedCalls,
    TaggedCalls,
    ThoughtsWritten,
)
from fathom.text.chat.template_text import TemplateText

_QUESTION = Message(role=Role.USER, content="?")
_WORDS = "fathomwords"
_THOUGHT = "fathomthought"
_NAME = "fathomtool"
_ARGUMENTS = {"fathomkey": "fathomone", "fathomlock": "fathomtwo"}
_TAG_BEFORE = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_TAG_AFTER = re.compile(r"^\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")
_NAME_KEY = re.compile(r'\{\s*"(\w+)":\s*"$')
_ARGUMENTS_KEY = re.compile(r'^",\s*"(\w+)":\s*$')


def learn_thoughts(text: TemplateText, opened: str) -> ThoughtsWritten | None:
    """Marks of thoughts. `opened`: a prompt, to see whether it opens one. None: the template knows of none."""
    if _is_of_channels(text):
        return None
    opens, closes = ("<think>", "</think>") if "</think>" in text.source else ("", "")
    answer = Message(role=Role.ASSISTANT, content=_WORDS, reasoning=_THOUGHT)
    before, thought, after = _tried(text, answer).partition(_THOUGHT)
    if thought:
        front, behind = _TAG_BEFORE.search(before), _TAG_AFTER.search(after)
        if front is not None and behind is not None:
            opens, closes = front[1], behind[1]
    if not closes:
        return None
    return ThoughtsWritten(opens=opens, closes=closes, opened_by_prompt=opened.rstrip().endswith(opens))


def learn_calls(text: TemplateText) -> CallsWritten | None:
    """How a call is written. None: not at all, or in a way that is not understood."""
    if not text.calls_as:
        return None
    if _is_of_channels(text):
        return ChannelCalls()
    words = _tried(text, Message(role=Role.ASSISTANT, content=_WORDS))
    header, _, end = words.partition(_WORDS)
    one = _calls_only(text, header, end, 1)
    before, name, behind = one.partition(_NAME)
    if not name:
        return None
    found = _find_object(behind)
    if found is None:
        return _tagged(before, behind)
    begins, ends = found
    between, after = behind[:begins], behind[ends:]
    name_key, arguments_key = _NAME_KEY.search(before), _ARGUMENTS_KEY.search(between)
    if name_key is not None and arguments_key is not None:
        closes = after.strip().removeprefix("}").strip()
        opens = before[: name_key.start()].strip()
        return JsonCalls(opens=opens, closes=closes, name_key=name_key[1], arguments_key=arguments_key[1])
    return _marked(before, between, after, _calls_only(text, header, end, 2))


def _is_of_channels(text: TemplateText) -> bool:
    written = ChannelCalls()
    return written.channel in text.source and written.message in text.source


def _marked(before: str, between: str, after: str, two: str) -> MarkedCalls | None:
    """`two`: how two calls are written; between them stands what closes the first and what opens the second."""
    opens, closes, all_open, all_close = before.strip(), after.strip(), "", ""
    second = two.partition(_NAME)[2]
    found = _find_object(second)
    if found is not None and _NAME in second:
        seam = second[found[1] :].partition(_NAME)[0]
        shared = _common([before[::-1], seam[::-1]])[::-1]
        opens = shared[max(0, shared.find("<")) :].strip()  # from the beginning of a tag
        closes = seam.strip().removesuffix(opens).strip()
        all_open = before.strip().removesuffix(opens).strip()
        all_close = after.strip().removeprefix(closes).strip()
    if not opens or not closes or not between.strip():
        return None
    return MarkedCalls(all_open=all_open, opens=opens, between=between.strip(), closes=closes, all_close=all_close)


def _tagged(before: str, behind: str) -> TaggedCalls | None:
    """From NAME a KEY b VALUE c KEY b VALUE d: what `a` and `c` have in common opens a key."""
    parts: list[str] = []
    for word in (word for pair in _ARGUMENTS.items() for word in pair):
        part, found, behind = behind.partition(word)
        if not found:
            return None
        parts.append(part)
    named, value_opens, next_key, again = parts
    shared = _common([named[::-1], next_key[::-1]])[::-1]
    key_opens = shared[shared.rfind("<") :] if "<" in shared else ""
    value_closes = next_key.removesuffix(key_opens)
    opens, *names = before.split(maxsplit=1)[:2] if before.strip() else ("",)
    if not opens or not key_opens or not value_closes.strip() or value_opens != again:
        return None
    return TaggedCalls(
        opens=opens,
        name_opens="".join(names).strip(),
        name_closes=named.removesuffix(key_opens).strip(),
        key_opens=key_opens,
        value_opens=value_opens.strip(),
        value_closes=value_closes.strip(),
        lines=value_opens.endswith("\n") and value_closes.startswith("\n"),
        closes=behind.strip().removeprefix(value_closes.strip()).split()[-1],
    )


def _calls_only(text: TemplateText, header: str, end: str, calls: int) -> str:
    """Calls as written, without what opens and ends an answer."""
    arguments = json.dumps(_ARGUMENTS)
    made = tuple(ToolCall(id=f"call0000{number}", name=_NAME, arguments=arguments) for number in range(calls))
    written = _tried(text, Message(role=Role.ASSISTANT, content="", tool_calls=made))
    return written.removesuffix(end)[len(_common([header, written])) :]


def _tried(text: TemplateText, answer: Message) -> str:
    """Empty: refused."""
    try:
        return text.write([_QUESTION, answer], (), opened=False)
    except DataError:
        return ""


def _find_object(text: str) -> tuple[int, int] | None:
    """Where the arguments stand as JSON."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if value == _ARGUMENTS:
            return match.start(), end
    return None


def _common(texts: Iterable[str]) -> str:
    """The longest common beginning."""
    shared = ""
    for letters in zip(*texts, strict=False):
        if len(set(letters)) > 1:
            break
        shared += letters[0]
    return shared
