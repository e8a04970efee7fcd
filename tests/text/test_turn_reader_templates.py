"""Sampled answers become messages: as the template wrote them, however the ids are cut, whatever was sampled."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fathom.core.records.sampling import FinishReason
from fathom.text.chat.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun
from fathom.text.chat.reading.written import ChannelCalls, JsonCalls, MarkedCalls, TaggedCalls
from synthetic.real_templates import TEMPLATES, TOOLS, answer, called, model, needs_shared, user, writer

pytestmark = needs_shared
SOME = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
FORMATS = {
    "qwen2_5_instruct": JsonCalls,
    "qwen3": JsonCalls,
    "qwen3_instruct_2507": JsonCalls,
    "qwen3_coder": TaggedCalls,
    "llama3_1_instruct": JsonCalls,
    "glm_4_6": TaggedCalls,
    "gpt_oss": ChannelCalls,
    "deepseek_v3": MarkedCalls,
    "deepseek_v3_1": MarkedCalls,
}
MARKS = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=run>", "<parameter=path>", "</parameter>"],
    *["<|im_end|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", " to=functions.run", "final"],
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    *["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```", "</function>", "<tool", "</thi", "run", "\n", " "],
    *['{"name": "run", "arguments": {"path": "a}"}}', '{"name": "run", "parameters": {}}', '{"name":', '"arguments":'],
    *['"', "{", "}", "\\", ",", "run\n", "👩‍👩‍👧", "function", '{"a": 2,', "[1]", "STOP", "ST"],
]
characters = st.characters(exclude_categories=("Cs", "Mn", "Mc", "Me"), exclude_characters="<>|｜{}")
letters = st.text(characters, min_size=1, max_size=8).map(
    lambda text: unicodedata.normalize("NFC", text)  # as Qwen's tokenizer does
)
said = letters.map(str.strip)
values = {"path": letters, "count": st.integers(-5, 5), "deep": st.booleans(), "more": st.just({"k": [1, "é"]})}


def read(reader, chunks, reason=FinishReason.STOP):
    deltas = [delta for chunk in chunks for delta in reader.feed(chunk)]
    rest, message = reader.end(reason)
    return [*deltas, *rest], message


def joined(deltas):
    """(content, reasoning, calls) as the deltas give them."""
    content = "".join(each.text for each in deltas if isinstance(each, TextDelta))
    reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
    calls = {each.index: [each.id, each.name, ""] for each in deltas if isinstance(each, ToolCallBegun)}
    for each in deltas:
        if isinstance(each, ToolArgumentsDelta):
            calls[each.index][2] += each.text
    return content, reasoning, [tuple(calls[index]) for index in sorted(calls)]


def parts(message):
    return message.content, message.reasoning, [(call.id, call.name, call.arguments) for call in message.tool_calls]


def sampled(name, message):
    """Ids of an answer as the template writes it behind a question, up to where a model stops."""
    tokenizer, _, _ = model(name)
    write = writer(name).write
    sent = write([user("?")], TOOLS, opened=True)
    whole = write([user("?"), message], TOOLS, opened=False)
    if name == "deepseek_v3":  # opens a thought that it does not write afterwards
        closed = write([user("?")], TOOLS, opened=False)
        whole = sent + message.reasoning + "\n</think>\n\n" + whole[len(closed) :].removeprefix("<｜Assistant｜>")
    assert whole.startswith(sent)
    ids = tokenizer.encode(whole[len(sent) :])
    stops = [place for place, token_id in enumerate(ids, 1) if token_id in tokenizer.special.stop_ids]
    return ids[: stops[0]] if stops else ids


@st.composite
def answers(draw, name):
    """What a template writes so that it can be told again."""
    properties = model(name)[1].properties
    written = properties.calls_at_once
    names = draw(st.lists(st.sampled_from(["run", "read_file"]), max_size=3 if written else 1))
    calls = []
    for tool in names:
        keys = draw(st.lists(st.sampled_from(sorted(values)), unique=True))
        calls.append(called(tool, json.dumps({key: draw(values[key]) for key in keys}, ensure_ascii=False)))
    content = draw(st.one_of(st.just(""), said))
    if calls and name == "llama3_1_instruct":
        content = ""  # this template leaves it out
    thinks = properties.thinks and name not in ("deepseek_v3_1",) and (name != "gpt_oss" or (calls and not content))
    reasoning = draw(said) if thinks and draw(st.booleans()) else ""
    return answer(content, *calls, reasoning=reasoning)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_learned(name):
    assert isinstance(model(name)[1].properties.calls, FORMATS[name])


@pytest.mark.parametrize("name", TEMPLATES)
@SOME
@given(data=st.data())
def test_an_answer_comes_back_as_the_template_wrote_it(name, data):
    check_it_comes_back(name, data)


@pytest.mark.parametrize("name", TEMPLATES)
@SOME
@given(data=st.data())
def test_whatever_is_sampled_is_read_the_same_however_it_is_cut(name, data):
    check_how_it_is_cut(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_answers(name, data):
    check_it_comes_back(name, data)
    check_how_it_is_cut(name, data)


def check_it_comes_back(name, data):
    message = data.draw(answers(name))
    ids = sampled(name, message)
    deltas, back = read(model(name)[2].reader(TOOLS, ()), [[each] for each in ids])
    assert joined(deltas) == parts(back)
    expected = [(call.name, call.parsed) for call in message.tool_calls]
    assert [(call.name, call.parsed) for call in back.tool_calls] == expected
    if message.content and message.tool_calls and name == "gpt_oss":
        assert back.reasoning == message.content  # what is said beside a call is written as a thought
    else:
        assert (back.content, back.reasoning) == (message.content, message.reasoning.strip("\n"))


def check_how_it_is_cut(name, data):
    tokenizer, _, readers = model(name)
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(MARKS), letters), max_size=12))
    ids = [each for piece in pieces for each in tokenizer.encode(piece)]
    wild = data.draw(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 150_000)), max_size=6))
    place = data.draw(st.integers(0, len(ids)))
    ids[place:place] = wild
    stops = data.draw(st.sampled_from([(), ("STOP",), ("}", "\n\n")]))
    tools = data.draw(st.sampled_from([(), TOOLS]))
    reason = data.draw(st.sampled_from(list(FinishReason)))
    whole = read(readers.reader(tools, stops), [ids], reason)
    single = read(readers.reader(tools, stops), [[each] for each in ids], reason)
    assert joined(whole[0]) == joined(single[0]) == parts(whole[1]) == parts(single[1])
    assert not any(delta.text == "" for delta in whole[0] if not isinstance(delta, ToolCallBegun))


def test_text_is_cut_into_whole_characters():
    tokenizer, _, readers = model("qwen2_5_instruct")
    text = "né 👩‍👩‍👧 日本語 \N{REPLACEMENT CHARACTER}!"
    deltas, message = read(readers.reader((), ()), [[each] for each in tokenizer.encode(text)])
    assert message.content == text
    assert "".join(each.text for each in deltas).count("\N{REPLACEMENT CHARACTER}") == 1


def test_half_a_character_at_the_end_is_told_as_damaged():
    tokenizer, _, readers = model("qwen2_5_instruct")
    ids = tokenizer.encode("a🜁")
    _, message = read(readers.reader((), ()), [ids[:-1]], FinishReason.LENGTH)
    assert message.content == tokenizer.decode(ids[:-1])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 255), max_size=120))
def test_damaged_bytes_are_spelled_as_the_tokenizer_spells_them_all(ids):
    """Ids below 256 are single bytes."""
    tokenizer, _, readers = model("qwen2_5_instruct")
    _, message = read(readers.reader((), ()), [ids])
    assert message.content == tokenizer.decode(ids)


def call_in(name, text, tools=TOOLS, reason=FinishReason.STOP):
    tokenizer, _, readers = model(name)
    message = read(readers.reader(tools, ()), [[each] for each in tokenizer.encode(text)], reason)[1]
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3", 'Hi\n<tool_call>{"name":"run","arguments":{"a": 2,}}</tool_call>', "Hi", [("run", '{"a": 2,}')]),
        ("qwen3", '<tool_call>\n{"name": "run", "arguments": [1]}\n</tool_call>', "", [("run", "[1]")]),
        ("qwen3", '<tool_call>\n{"name": "run", "arguments": 3}\n</tool_call>', "", [("run", "3")]),
        ("qwen3", '<tool_call>\n{"name": "run", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("run", '{"a": 1}')]),
        ("qwen3", '<tool_call>\n{"name": "run"}\n</tool_call> bye', "bye", [("run", "{}")]),
        ("qwen3", '<tool_call>{"arguments": {"b": 1}, "name": "run"}</tool_call>', "", [("run", '{"b": 1}')]),
        ("qwen3", '<tool_call>{"name": "run", "id": 1, "arguments": {"b": 1}}</tool_call>', "", [("run", '{"b": 1}')]),
        (
            "qwen3",
            '<tool_call>{"name": "run", "arguments": {"b": "</tool_call>"}}',
            "",
            [("run", '{"b": "</tool_call>"}')],
        ),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {"b": "x', "", [("run", '{"b": "x')]),
        ("qwen3", "<tool_call>run it</tool_call>", "<tool_call>run it</tool_call>", []),
        ("qwen3", "<tool_call>", "<tool_call>", []),
        ("qwen3", "<tool_", "<tool_", []),
        ("qwen3", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}', "", "fg"),
        ("llama3_1_instruct", '{"name": "run", "parameters": {"a": 1}}', "", [("run", '{"a": 1}')]),
        ("llama3_1_instruct", '{"name": "unknown", "parameters": {"a": 1}}', "", [("unknown", '{"a": 1}')]),
        ("llama3_1_instruct", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_1_instruct", '{"age": 3} is it', '{"age": 3} is it', []),
        ("llama3_1_instruct", '{"name": "run", "parameters": {}}; {"name": "run", "parameters": {}}', "", "run run"),
        ("qwen3_coder", "<tool_call>\n<function=run>\n</function>\n</tool_call>", "", [("run", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=run>\n<parameter=path>\na\n\nb\n</parameter>",
            "",
            [("run", '{"path": "a\\n\\nb"')],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=run><parameter=count>x</parameter></function></tool_call>",
            "",
            [("run", '{"count": "x"}')],
        ),
        ("qwen3_coder", "<tool_call>\n<function=run>\n<parameter=path>\na", "", [("run", '{"path": "\\na')]),
        ("qwen3_coder", "<tool_call>\n</tool_call>!", "<tool_call>\n</tool_call>!", []),
        ("glm_4_6", "\n<tool_call>run\n</tool_call>", "", [("run", "{}")]),
        (
            "glm_4_6",
            "<tool_call>run\n<arg_key>path</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
            "",
            [("run", '{"path": "5"}')],
        ),
        (
            "deepseek_v3_1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{oops<｜tool▁call▁end｜>",
            "",
            [("run", "{oops")],
        ),
        ("gpt_oss", " to=functions.run<|channel|>commentary json<|message|>{oops", "", [("run", "{oops")]),
        ("gpt_oss", "no header at all", "no header at all", []),
    ],
)
def test_malformed_calls_are_calls_with_what_was_written_or_text(name, text, content, calls):
    found_content, found = call_in(name, text)
    if isinstance(calls, str):
        assert [call for call, _ in found] == (calls.split() if " " in calls else list(calls))
    else:
        assert found == calls
    assert found_content == content


def test_what_looks_like_a_call_is_text_where_no_tools_are_offered():
    text = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    assert call_in("qwen3", text, tools=()) == (text, [])


def test_a_call_is_announced_as_soon_as_its_name_is_known_and_its_arguments_stream():
    tokenizer, _, readers = model("qwen3")
    reader = readers.reader(TOOLS, ())
    assert reader.feed(tokenizer.encode('<tool_call>\n{"name": "ru')) == []
    (begun,) = reader.feed(tokenizer.encode('n"'))
    assert (begun.index, begun.name, len(begun.id)) == (0, "run", 9)
    assert joined([begun, *reader.feed(tokenizer.encode(', "arguments": {"path": "a'))])[2][0][2] == '{"path": "a'


def test_thoughts_are_told_apart_also_where_the_prompt_opened_them():
    for name, text in (("qwen3", "<think>\nhm\n\n</think>\n\nyes"), ("deepseek_v3", "hm\n</think>\n\nyes")):
        tokenizer, _, readers = model(name)
        message = read(readers.reader((), ()), [[each] for each in tokenizer.encode(text)])[1]
        assert (message.reasoning, message.content) == ("hm", "yes")


def test_a_stop_string_and_what_follows_is_not_told():
    tokenizer, _, readers = model("qwen3")
    message = read(readers.reader((), ("END",)), [[each] for each in tokenizer.encode("one EN two END three")])[1]
    assert message.content == "one EN two "


def test_ids_of_calls_are_the_same_in_a_repeated_run_and_others_in_another_turn():
    tokenizer, _, readers = model("qwen3")
    ids = tokenizer.encode('<tool_call>{"name": "run", "arguments": {}}</tool_call>' * 2)
    turns = [read(readers.reader(TOOLS, (), turn), [ids])[1].tool_calls for turn in ("t0", "t0", "t1")]
    assert turns[0] == turns[1]
    assert len({call.id for calls in turns for call in calls}) == 4
