"""Whatever is said: what was rendered, sampled and appended is what the template itself writes, or it is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fathom.core.errors import NotAppendableError
from fathom.core.records.message import Message, Role
from fathom.text.chat.uses import Use, use_of
from synthetic.real_templates import TEMPLATES, TOOLS, called, model, needs_shared, writer
from synthetic.real_templates import answer as said

pytestmark = needs_shared

CALLS = (Use.TOOLS, Use.WORDS_TOOLS, Use.WORDS_TEXT)
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
APPENDABLE = {
    "qwen2_5_instruct": {Use.TEXT, *CALLS, Use.SEVERAL, Use.SYSTEM},
    "qwen3": {Use.TEXT, *CALLS, Use.SEVERAL, Use.THOUGHT_TOOLS, Use.SYSTEM},
    "qwen3_instruct_2507": {Use.TEXT, *CALLS, Use.SEVERAL, Use.SYSTEM},
    "qwen3_coder": {Use.TEXT, *CALLS, Use.SEVERAL, Use.SYSTEM},
    "llama3_1_instruct": {Use.TEXT, Use.TOOLS, Use.SYSTEM},
    "glm_4_6": {Use.TEXT, *CALLS, Use.SEVERAL, Use.THOUGHT_TOOLS, Use.SYSTEM},
    "gpt_oss": {Use.TEXT, Use.TOOLS, Use.THOUGHT_TOOLS, Use.WORDS_TOOLS},
    "deepseek_v3": set(),
    "deepseek_v3_1": {Use.TEXT, *CALLS, Use.SEVERAL},
}
"""The report of each template, checked by hand against its source."""
HALF_A_CHARACTER = '{"path": "\\ud800", "\\udfff": 1}'
"""An object to JSON, and nothing that could be written."""
END = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "deepseek": "<｜end▁of▁sentence｜>"}
GLM_OPENERS = ("<|user|>", "<|observation|>", "<|system|>")

plain = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>|｜"), max_size=12)
words = st.one_of(
    plain,
    st.sampled_from(
        ["", "\n\nOK", "\n", "  hi  ", "fathomanswer", "fathomnext ?", "👩‍👩‍👧 é e\u0301", "{}", "?", '{"a": 1}\n']
    ),
)
tool_words = st.one_of(
    words, st.sampled_from(["<tool_response>x</tool_response>", "</think>", '{"a": [1, "é"]}', "[]"])
)
arguments = st.dictionaries(st.sampled_from(["path", "count", "k"]), st.one_of(plain, st.integers(), st.booleans()))
raw = st.one_of(
    arguments.map(json.dumps),
    st.sampled_from(['{"a": 2,', "[1]", "3", "", '"x"', '{"a": "fathomanswer"}', HALF_A_CHARACTER]),
)


@st.composite
def conversations(draw, *, thinks):
    """A conversation as an agent has it: it ends with what was said behind the last answer."""
    messages = [Message(role=Role.SYSTEM, content=draw(words))] if draw(st.booleans()) else []
    messages.append(Message(role=Role.USER, content=draw(words)))
    for number in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(["run", "read_file", "unknown"]), max_size=3))
        calls = tuple(called(name, draw(raw), f"call{number}{n:04}") for n, name in enumerate(names))
        thought = f"thought {draw(plain)}".strip() if thinks and draw(st.booleans()) else ""
        messages.append(said(draw(words), *calls, reasoning=thought))
        for call in calls:
            call_id = draw(st.sampled_from([call.id, call.id, call.id, "", "other0001"]))
            messages.append(Message(role=Role.TOOL, content=draw(tool_words), tool_call_id=call_id))
        if not calls or draw(st.integers(0, 3)) == 0:
            roles = st.sampled_from([[Role.USER]] * 6 + [[Role.SYSTEM, Role.USER], [Role.USER, Role.USER]])
            messages += [Message(role=role, content=draw(tool_words)) for role in draw(roles)]
    return messages


def sampled_text(name: str, between: str, message: Message) -> str:
    """What a model samples that writes just as the template does: up to the token that ends its turn."""
    if name == "gpt_oss":
        end = "<|call|>" if message.tool_calls else "<|end|>"
        place = between.index(end, 0 if message.tool_calls else between.index("final<|message|>"))
        return between[:place] + ("<|call|>" if message.tool_calls else "<|return|>")
    if name == "glm_4_6":
        place, opener = min((between.index(opener), opener) for opener in GLM_OPENERS if opener in between)
        return between[:place] + (opener if opener != "<|system|>" else "")
    end = next(end for family, end in END.items() if name.startswith(family))
    return between[: between.index(end)] + end


def steps(messages):
    """Places of answers, each with the place of the one behind it."""
    answers = [place for place, message in enumerate(messages) if message.role is Role.ASSISTANT]
    return zip(answers, [*answers[1:], len(messages)], strict=True)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES, derandomize=True)
@given(data=st.data())
def test_what_is_appended_is_what_the_template_writes_or_it_is_refused(name, data):
    check_a_conversation(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(data=st.data())
def test_many_conversations(name, data):
    check_a_conversation(name, data)


def check_a_conversation(name, data):
    tokenizer, renderer, _ = model(name)
    properties = renderer.properties
    messages = data.draw(conversations(thinks=properties.thinks))
    tools = data.draw(st.sampled_from([(), TOOLS]))
    write = writer(name).write
    for place, following in steps(messages):
        before, new = messages[: place + 1], messages[place + 1 : following]
        sent = write(messages[:place], tools, opened=True)
        whole = write(messages[:following], tools, opened=True)
        assert renderer.render(messages[:following], tools).tolist() == tokenizer.encode(whole)
        fits = whole.startswith(sent) and messages[place].reasoning in whole[len(sent) :]
        several = len(messages[place].tool_calls) > 1 and not properties.calls_at_once
        sampled = sampled_text(name, whole[len(sent) :], messages[place]) if fits and not several else None
        last = tokenizer.encode(sampled)[-1:] if sampled else []
        try:
            appended = renderer.extend(before, new, tools, last[0] if last else None).tolist()
        except NotAppendableError:  # the context is then a full render: the template's own
            refused = [use for use in use_of(before, new) if properties.uses[use]]
            both = {Use.THOUGHT_TOOLS, Use.WORDS_TOOLS} <= set(use_of(before, new))  # taken for one message's
            assert several or refused or both or not fits, "refused, though the template only adds to what was there"
            continue
        assert fits
        assert sampled is not None
        assert appended == tokenizer.encode(whole[len(sent) + len(sampled.replace("<|return|>", "<|end|>")) :])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("written", [HALF_A_CHARACTER, "[" * 9_000, '{"path": ' + "1" * 5_000 + "}", '{"path": NaN}'])
def test_whatever_was_written_as_arguments_the_next_prompt_can_be_rendered(name, written):
    messages = [Message(role=Role.USER, content="?"), said("", called("run", written, "call00000"))]
    messages.append(Message(role=Role.TOOL, content="no", tool_call_id="call00000", name="run"))
    assert len(model(name)[1].render(messages, TOOLS))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_report_says_for_which_uses_a_template_can_be_gone_on_from(name):
    properties = model(name)[1].properties
    assert {use for use, reason in properties.uses.items() if not reason} == APPENDABLE[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2_5_instruct", {"turn_end": "<|im_end|>\n", "sampled_end": "<|im_end|>", "begins": "", "thinks": False}),
        ("qwen3", {"turn_end": "<|im_end|>\n", "opens_with": "<|im_start|>assistant\n", "thinks": True}),
        ("llama3_1_instruct", {"begins": "<|begin_of_text|>", "calls_at_once": False, "turn_end": "<|eot_id|>"}),
        ("llama3_1_instruct", {"strips": ("system", "user", "assistant"), "calls_as": "mapping"}),
        ("glm_4_6", {"turn_end": "", "stop_opens_next": True, "adds_in_front": "[gMASK]<sop>"}),
        ("gpt_oss", {"turn_end": "<|end|>", "sampled_end": "<|return|>", "calls_at_once": False, "thinks": True}),
        ("deepseek_v3", {"calls_as": "text", "opens_with": "<｜Assistant｜><think>\n", "thinks": True}),
        ("deepseek_v3_1", {"turn_end": "<｜end▁of▁sentence｜>", "opens_with": "<｜Assistant｜><think></think>"}),
    ],
)
def test_properties_are_those_of_the_source(name, expected):
    properties = model(name)[1].properties
    assert {key: getattr(properties, key) for key in expected} == expected


def test_system_text_that_a_template_adds_is_written_once():
    tokenizer, renderer, _ = model("qwen2_5_instruct")
    assert "You are Qwen" in renderer.properties.adds_in_front
    messages = [Message(role=Role.USER, content="a"), said("b")]
    appended = renderer.extend(messages, [Message(role=Role.USER, content="c")], (), None).tolist()
    assert "You are Qwen" not in tokenizer.decode(appended)
