"""Bodies of the three APIs: what becomes of them, and what is refused by name."""

import json

import pytest

from fathom.core.records.message import Message, Role, ToolCall
from fathom.core.records.sampling import SamplingParams
from fathom.rollout.session.call import CallRefusedError, Refusal
from fathom.rollout.session.dialects.chat_completions import ChatCompletions
from fathom.rollout.session.dialects.dialect import Terms
from fathom.rollout.session.dialects.messages import Messages
from fathom.rollout.session.dialects.messages_writer import arguments_of, input_of
from fathom.rollout.session.dialects.responses import Responses

TERMS = Terms(sampling=SamplingParams(temperature=0.9, top_p=0.8))
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI}
RESPONSES = {"model": "m", "input": "hi"}
MESSAGES = {"model": "m", "messages": HI, "max_tokens": 9}


def read(dialect, body, terms=TERMS):
    return dialect.read(json.dumps(body).encode(), terms)


@pytest.mark.parametrize(
    ("dialect", "body", "named"),
    [
        *[
            (ChatCompletions(), CHAT | {name: value}, name)
            for name, value in {
                "n": 2,
                "logprobs": True,
                "seed": 1,
                "temperature": 0,
                "presence_penalty": 0.1,
                "frequency_penalty": -1,
                "response_format": {"type": "json_schema"},
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "reasoning_effort": "high",
                "functions": [],
                "what": {"is": "this"},
            }.items()
        ],
        *[
            (Responses(), RESPONSES | {name: value}, name)
            for name, value in {
                "previous_response_id": "resp_1",
                "conversation": "c",
                "background": True,
                "truncation": "auto",
                "temperature": 0.0,
                "text": {"format": {"type": "json_schema"}},
                "tool_choice": {"type": "function", "name": "f"},
                "top_logprobs": 3,
                "include": ["message.output_text.logprobs"],
                "reasoning": {"effort": "low"},
                "tools": [{"type": "web_search"}],
            }.items()
        ],
        *[
            (Messages(), MESSAGES | {name: value}, name)
            for name, value in {
                "temperature": 0,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "tool_choice": {"type": "any"},
                "mcp_servers": [{"url": "x"}],
                "container": "c",
                "tools": [{"type": "bash_20250124", "name": "bash"}],
            }.items()
        ],
        (
            ChatCompletions(),
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
        ),
        (ChatCompletions(), {"model": "m", "messages": [{"role": "user", "content": "x", "weight": 1}]}, "weight"),
        (Responses(), {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (Responses(), {"model": "m", "input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (Messages(), MESSAGES | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(dialect, body, named):
    with pytest.raises(CallRefusedError, match=named) as refused:
        read(dialect, body)
    assert refused.value.kind is Refusal.UNSUPPORTED
    assert named.encode() in dialect.refusal(refused.value)


@pytest.mark.parametrize("dialect", [ChatCompletions(), Responses(), Messages()])
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'"x"', b"{}", b'{"model": 1}', b"\xff", b"[" * 100_000, b'{"model": "m", "messages": [1]}'],
)
def test_a_malformed_body_is_refused(dialect, body):
    with pytest.raises(CallRefusedError) as refused:
        dialect.read(body, TERMS)
    assert json.loads(dialect.refusal(refused.value))["error"]["message"]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            ChatCompletions(),
            CHAT
            | {"n": 1, "logprobs": False, "presence_penalty": 0, "seed": None, "user": "u", "metadata": {"a": "b"}}
            | {"store": True, "service_tier": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        ),
        (
            Responses(),
            RESPONSES | {"store": True, "truncation": "disabled", "include": [], "reasoning": {"summary": "auto"}},
        ),
        (Messages(), MESSAGES | {"metadata": {"user_id": "u"}, "tool_choice": {"type": "auto"}}),
    ],
)
def test_what_changes_nothing_is_accepted(dialect, body):
    call = read(dialect, body).call
    assert call.messages == (Message(role=Role.USER, content="hi"),)
    assert call.sampling is None


def test_the_server_can_be_told_to_ignore_a_parameter():
    terms = Terms(sampling=SamplingParams(), ignored=frozenset({"temperature", "seed", "strict", "effort"}))
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    call = read(ChatCompletions(), CHAT | {"temperature": 0, "seed": 5, "tools": [tool]}, terms).call
    assert (call.sampling, call.tools[0].name) == (None, "f")
    assert read(Responses(), RESPONSES | {"reasoning": {"effort": "low"}}, terms).call.messages


def test_overrides_start_from_the_distribution_of_the_session():
    call = read(ChatCompletions(), CHAT | {"temperature": 0.5, "logit_bias": {"7": -5, "3": 1}}).call
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.logit_bias.ids) == (0.5, 0.8, (3, 7))
    assert read(Messages(), MESSAGES | {"top_k": 4}).call.sampling.top_k == 4
    for wrong in ({"top_p": 2}, {"logit_bias": {"x": 1}}, {"logit_bias": {"1": 1000}}):
        with pytest.raises(CallRefusedError):
            read(ChatCompletions(), CHAT | wrong)


def test_no_tool_choice_is_no_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    assert bytes(read(ChatCompletions(), CHAT | {"tools": [tool]}).call.tools[0].parameters) == b'{"default": null}'
    assert read(ChatCompletions(), CHAT | {"tools": [tool], "tool_choice": "none"}).call.tools == ()


def test_nulls_inside_a_tools_schema_stay_when_others_are_left_out():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    said = {"role": "assistant", "content": "x", "unknown_to_us": None}
    call = read(ChatCompletions(), CHAT | {"messages": [*HI, said, *HI], "tools": [tool]}).call
    assert json.loads(bytes(call.tools[0].parameters)) == {"default": None}


def test_results_of_tools_and_words_of_the_user_keep_their_order():
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "2", "is_error": True},
        {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "on"},
    ]
    call = read(Messages(), MESSAGES | {"messages": [{"role": "user", "content": content}]}).call
    assert [(each.role.value, each.content, each.tool_call_id) for each in call.messages] == [
        ("tool", "1", "a"),
        ("tool", "2", "b"),
        ("user", "go\non", ""),
    ]


def test_items_of_one_answer_are_one_message():
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "no"},
    ]
    call = read(Responses(), RESPONSES | {"input": items, "instructions": "be good"}).call
    answer = Message(
        role=Role.ASSISTANT, content="so", reasoning="hm", tool_calls=(ToolCall(id="c", name="f", arguments="{"),)
    )
    assert call.messages == (
        Message(role=Role.SYSTEM, content="be good"),
        Message(role=Role.USER, content="go"),
        answer,
        Message(role=Role.TOOL, content="no", tool_call_id="c"),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1}',
        "{}",
        "",
        "{",
        "[1]",
        '"x"',
        "null",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"é": "\\u0000"}',
        '{"a": 1, "a": 2}',
        '{"malformed_arguments": "x"}',
        '{"malformed_arguments": 1}',
        '{"a": 12345678901234567890123}',
        "[" * 100_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
    ],
)
def test_arguments_survive_the_way_through_an_object(arguments):
    given = input_of(arguments)
    json.dumps(given, allow_nan=False).encode()
    returned = arguments_of(json.loads(json.dumps(given)))
    try:
        same = json.loads(arguments)
    except (ValueError, RecursionError):
        same = None
    assert returned == arguments or (isinstance(same, dict) and json.loads(returned) == same)


def said_with(dialect, field: bytes) -> bytes:
    """A whole request, and one more field."""
    whole = {ChatCompletions: CHAT, Responses: RESPONSES, Messages: MESSAGES}[type(dialect)]
    return json.dumps(whole).encode()[:-1] + b", " + field + b"}"


@pytest.mark.parametrize("dialect", [ChatCompletions(), Responses(), Messages()])
@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b'"\\ud800"', b"[" * 5_000 + b"]" * 5_000, b"1" * 5_000])
def test_a_field_that_cannot_even_be_read_is_refused(dialect, value):
    with pytest.raises(CallRefusedError):
        dialect.read(said_with(dialect, b'"unheard_of": ' + value), TERMS)


@pytest.mark.parametrize(
    "field",
    [
        b'"logit_bias": {"abc": 1}',
        b'"logit_bias": {"-5": 1}',
        b'"logit_bias": {"4294967296": 1}',
        b'"logit_bias": {"5": 101}',
        b'"top_k": 99999999999',
    ],
)
def test_numbers_that_no_engine_takes_are_refused_by_the_name_of_the_parameter(field):
    with pytest.raises(CallRefusedError) as refused:
        ChatCompletions().read(said_with(ChatCompletions(), field), TERMS)
    assert refused.value.param == field.split(b'"')[1].decode()


@pytest.mark.parametrize("schema", [b"3", b'"x"', b"[]", b'{"a": "\xff"}', b'{"a": 1e999}'])
def test_a_tool_whose_schema_is_no_object_is_refused_where_it_is_sent(schema):
    """And not when a template or the reader of an answer stumbles over it."""
    tools = {
        ChatCompletions(): b'{"type": "function", "function": {"name": "f", "parameters": %s}}',
        Responses(): b'{"type": "function", "name": "f", "parameters": %s}',
        Messages(): b'{"name": "f", "input_schema": %s}',
    }
    for dialect, tool in tools.items():
        with pytest.raises(CallRefusedError) as refused:
            dialect.read(said_with(dialect, b'"tools": [' + tool % schema + b"]"), TERMS)
        assert refused.value.kind is Refusal.INVALID


@pytest.mark.parametrize("value", [b"1" * 5_000, b'"\xff"'])
def test_the_input_of_a_tool_that_cannot_be_read_is_refused(value):
    block = b'[{"type": "tool_use", "id": "c", "name": "f", "input": {"a": ' + value + b"}}]"
    body = b'{"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": ' + block + b"}]}"
    with pytest.raises(CallRefusedError, match="input of a tool"):
        Messages().read(body, TERMS)


def test_deep_arguments_are_refused_and_break_nothing():
    deep = '{"a":' * 3_000 + "1" + "}" * 3_000
    block = '[{"type": "tool_use", "id": "c", "name": "f", "input": ' + deep + "}]"
    body = '{"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": ' + block + "}]}"
    with pytest.raises(CallRefusedError):
        Messages().read(body.encode(), TERMS)
