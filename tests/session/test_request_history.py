"""What of a request was read before is not read again: the call is the same, whatever the agent does to its history."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.records.sampling import SamplingParams
from fathom.rollout.session.call import CallRefusedError
from fathom.rollout.session.dialects.chat_completions import ChatCompletions
from fathom.rollout.session.dialects.dialect import Dialect, Terms
from fathom.rollout.session.dialects.history import History
from fathom.rollout.session.dialects.messages import Messages
from fathom.rollout.session.dialects.responses import Responses
from fathom.rollout.session.matching import Prefixes

TERMS = Terms(sampling=SamplingParams())
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "é\n"}, {"type": "text", "text": "]"}]},
    {"role": "assistant", "content": "[{"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "unknown": None},
    {"role": "tool", "content": "5", "tool_call_id": "c"},
    {"role": "system", "content": "s"},
    {"role": "user", "content": "x" * 50},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "]"}
ANTHROPIC = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}, RESULT]},
    {"role": "assistant", "content": "[{"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}]},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "é\n"}], "id": None},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "]"}], "status": None},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "[{", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "5"},
    {"role": "developer", "content": "s"},
]
BAD = {"role": "nobody", "content": "x"}


def body(messages: list[object], name: str = "messages", **more: object) -> bytes:
    separators = (", ", ": ") if more.pop("wide", False) else (",", ":")
    return json.dumps({"model": "m", **more, name: messages}, separators=separators).encode()


def outcome(dialect: Dialect, asked: bytes, history: History | None) -> object:
    try:
        return dialect.read(asked, TERMS, history).call
    except CallRefusedError as error:
        return error.kind, str(error), error.param


HOW = st.sampled_from(["go on", "go on", "again", "anew", "edit", "shorten"])


def steps_of(items: list[dict[str, object]]) -> st.SearchStrategy[list[tuple[list[object], str, bool]]]:
    """What is new in each request, what becomes of what was there, and how the JSON is written."""
    new = st.lists(st.sampled_from([*items, BAD]), max_size=5)
    return st.lists(st.tuples(new, HOW, st.booleans()), min_size=1, max_size=8)


def next_of(messages: list[object], new: list[object], how: str) -> list[object]:
    match how:
        case "go on":
            return [*messages, *new]
        case "anew":
            return new
        case "edit":
            return [{"role": "user", "content": "edited"}, *messages[1:]]
        case "shorten":
            return messages[:-1]
    return messages


@settings(deadline=None)
@given(steps=steps_of(CHAT))
def test_chat_completions_are_read_as_if_nothing_was_known(steps) -> None:
    history, messages = History(Prefixes().settled), []
    for new, how, wide in steps:
        messages = next_of(messages, new, how)
        asked = body(messages, wide=wide)
        assert outcome(ChatCompletions(), asked, history) == outcome(ChatCompletions(), asked, None)


@settings(deadline=None)
@given(steps=steps_of(ITEMS), told=st.lists(st.sampled_from([None, "s", "t"]), min_size=8, max_size=8))
def test_responses_are_read_as_if_nothing_was_known(steps, told) -> None:
    """Items of one answer may come in two requests: they are one message all the same."""
    history, messages = History(Prefixes().settled), []
    for (new, how, wide), instructions in zip(steps, told, strict=False):
        messages = next_of(messages, new, how)
        asked = body(messages, "input", wide=wide, instructions=instructions)
        assert outcome(Responses(), asked, history) == outcome(Responses(), asked, None)
        assert outcome(Responses(), body("hi", "input"), history) == outcome(Responses(), body("hi", "input"), None)


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.sampled_from(ANTHROPIC), max_size=3), st.sampled_from(["", "s", "t"])), max_size=6
    )
)
def test_messages_are_read_as_if_nothing_was_known(steps) -> None:
    history, messages = History(Prefixes().settled), []
    for new, system in steps:
        messages = [*messages, *new]
        asked = body(messages, max_tokens=5, system=system)
        assert outcome(Messages(), asked, history) == outcome(Messages(), asked, None)


def test_one_api_does_not_go_on_from_what_another_has_read() -> None:
    history = History(Prefixes().settled)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    dialects = [(ChatCompletions(), {}), (Messages(), {"max_tokens": 1}), (ChatCompletions(), {})]
    dialects += [(Responses(), {"name": "input"}), (ChatCompletions(), {})]
    for dialect, more in dialects:
        asked = body(messages, **more)
        assert outcome(dialect, asked, history) == outcome(dialect, asked, None)
        messages = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    "asked",
    [b"", b"[]", b"{", b'{"messages": 5}', b'{"messages": "[]"}', b'{"messages": []}', b'{"model":"m","messages":[ ]}'],
)
def test_what_is_no_history_is_refused_as_without_one(asked: bytes) -> None:
    history = History(Prefixes().settled)
    for _ in range(2):
        assert outcome(ChatCompletions(), asked, history) == outcome(ChatCompletions(), asked, None)


def test_only_what_is_new_is_read() -> None:
    history = History(Prefixes().settled)
    first = body(CHAT[:3])
    assert history.shortened(first, "chat.completions") == (first, ())
    known = ChatCompletions().read(first, TERMS, history).call.messages
    shortened, found = history.shortened(body(CHAT), "chat.completions")
    assert found == known
    assert all(one is other for one, other in zip(found, known, strict=True))
    assert json.loads(shortened)["messages"] == CHAT[3:]


def test_only_new_items_are_read_and_those_of_one_answer_are_joined() -> None:
    history = History(Prefixes().settled)
    known = Responses().read(body(ITEMS[:4], "input"), TERMS, history).call.messages
    shortened, found = history.shortened(body(ITEMS, "input"), "responses", "input")
    assert found == known
    assert json.loads(shortened)["input"] == ITEMS[4:]
    (answer,) = (
        each for each in Responses().read(body(ITEMS, "input"), TERMS, history).call.messages if each.reasoning
    )
    assert (answer.reasoning, answer.content, answer.tool_calls[0].name) == ("]", "[{", "f")
