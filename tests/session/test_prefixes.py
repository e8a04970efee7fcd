"""Prefix matching: the deepest known history is found, by the strictest reading that finds it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.rollout.session.matching import Prefixes, Strictness

TOOL = Tool(name="bash", description="", parameters=msgspec.Raw(b"{}"))


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def calls(arguments: str, call_id: str = "c1", reasoning: str = "", content: str = "") -> Message:
    call = ToolCall(id=call_id, name="bash", arguments=arguments)
    return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=(call,))


SENT = calls('{"a": 1, "b": [2]}', reasoning="hm")


@pytest.mark.parametrize(
    ("returned", "strictness"),
    [
        (SENT, Strictness.EXACT),
        (calls('{"b":[2],"a":1}', reasoning="hm"), Strictness.JSON),
        (calls('{"b":[2],"a":1}'), Strictness.CONTENT),
        (calls('{"a": 1, "b": [2]}', call_id="other"), Strictness.CONTENT),
        (calls('{"a": 1, "b": [2]}', content="\n "), Strictness.CONTENT),
        (calls('{"a": 1, "b": [3]}', reasoning="hm"), None),
        (calls('{"a": 1, "b": [2]', reasoning="hm"), None),
        (Message(role=Role.ASSISTANT, content=""), None),
    ],
)
def test_a_history_that_was_written_anew_is_found_by_the_strictest_reading(returned, strictness):
    prefixes = Prefixes()
    prefixes.remember([user("go"), SENT], [TOOL], 7)
    match = prefixes.find([user("go"), returned, user("next")], [TOOL])
    assert (match and (match.place, match.messages, match.strictness)) == (strictness and (7, 2, strictness))


def test_malformed_arguments_are_equal_to_themselves_only():
    prefixes = Prefixes()
    prefixes.remember([user("go"), calls('{"a": 2,')], [], 1)
    assert prefixes.find([user("go"), calls('{"a": 2,')], []).strictness is Strictness.EXACT
    assert prefixes.find([user("go"), calls('{"a": 2')], []) is None


def test_other_tools_are_another_conversation():
    prefixes = Prefixes()
    prefixes.remember([user("go")], [TOOL], 1)
    assert prefixes.find([user("go")], []) is None


def test_the_place_remembered_last_counts():
    prefixes = Prefixes()
    prefixes.remember([user("go")], [], 1)
    prefixes.remember([user("go")], [], 2)
    assert prefixes.find([user("go")], []).place == 2


MESSAGES = st.lists(st.sampled_from([user("a"), user("b"), SENT, calls(json.dumps({"b": [2], "a": 1}))]), max_size=5)


@given(known=st.lists(MESSAGES, max_size=6), asked=st.lists(MESSAGES, min_size=1, max_size=4))
def test_the_longest_known_prefix_is_found_whatever_was_asked_before(known, asked):
    prefixes = Prefixes()
    for place, messages in enumerate(known):
        prefixes.remember(messages, [], place)
    for messages in asked:
        match = prefixes.find(messages, [])
        exact = [len(each) for each in known if each and messages[: len(each)] == each]
        assert (match.messages if match else 0) >= max(exact, default=0)
        if match is not None:
            assert 0 < match.messages <= len(messages)
