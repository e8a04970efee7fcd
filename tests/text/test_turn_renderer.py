"""What is appended to a sampled answer, with small templates and tokenizers of single characters."""

from __future__ import annotations

import json

import msgspec
import pytest
from small_tokenizer import save_tokenizer

from fathom.core.errors import ConfigError, DataError, NotAppendableError
from fathom.core.records.message import Tool
from fathom.text.chat.one_call_each import one_call_each
from fathom.text.chat.reading.written import JsonCalls
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.chat.uses import Use
from fathom.text.tokenizer import Tokenizer
from synthetic.real_templates import answer, called, model, needs_shared, result, system, user

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n?!:.,<>/{}[]\"'_-="
OPENS = "{% if add_generation_prompt %}assistant: {% endif %}"
PLAIN = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}" + OPENS
OPENS_A_TURN = "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
NO_END = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% endfor %}" + OPENS_A_TURN
END_OF_LAST = (
    "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}</s>{% endif %}{% endfor %}" + OPENS_A_TURN
)
TOOLED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    '{% for c in m.tool_calls or [] %}[CALL]{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}[/CALL]{% endfor %}'
    "{% if m.role == 'tool' %} for {{ m.tool_call_id }}{% endif %}</s>{% endfor %}" + OPENS
)
WITH_TOOLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'user' and tools %} tools: {{ tools | length }}{% endif %}</s>{% endfor %}" + OPENS
)


def renderer(folder, template, stops=("</s>",)):
    save_tokenizer(folder, letters=LETTERS, config={"chat_template": template})
    ids = [Tokenizer.load(folder).encode(stop)[0] for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.load(folder)
    made = TurnRenderer(tokenizer)

    def spelled(ids):
        return "".join(map(tokenizer.decode_token, ids.tolist()))

    def extended(before, new, last=None, tools=()):
        return spelled(made.extend(before, new, tools, None if last is None else tokenizer.encode(last)[0]))

    return made, spelled, extended


@pytest.mark.parametrize(
    ("last", "appended"),
    [
        ("</s>", "\nuser: b</s>\nassistant: "),
        ("a", "</s>\nuser: b</s>\nassistant: "),
        (None, "</s>\nuser: b</s>\nassistant: "),
        ("<turn>", "\nuser: b</s>\nassistant: "),
    ],
)
def test_a_turn_s_end_is_appended_where_it_was_not_sampled(tmp_path, last, appended):
    """`<turn>` is a stop token too: it ended the turn in the place of `</s>`."""
    _, _, extended = renderer(tmp_path, PLAIN, ("</s>", "<turn>"))
    assert extended([user("a"), answer("x")], [user("b")], last) == appended


def test_a_prompt_begins_once_and_what_is_appended_does_not(tmp_path):
    made, spelled, extended = renderer(tmp_path, PLAIN)
    assert made.properties.begins == "<s>"
    assert spelled(made.render([user("a")], ())) == "<s>user: a</s>\nassistant: "
    assert "<s>" not in extended([user("a"), answer("x")], [user("b")])


@pytest.mark.parametrize(("last", "opening"), [("<turn>", ""), ("a", "<turn>")])
def test_a_stop_token_that_opens_the_next_turn_is_there_once(tmp_path, last, opening):
    made, _, extended = renderer(tmp_path, NO_END, ("<turn>",))
    assert (made.properties.turn_end, made.properties.stop_opens_next) == ("", True)
    assert extended([user("a"), answer("x")], [user("b")], last) == f"{opening}user: b<turn>assistant: "


def test_what_opens_the_next_turn_is_not_taken_for_the_end_of_one(tmp_path):
    """A template that ends only the last answer: the sampled end stays, the next turn's beginning too."""
    _, _, extended = renderer(tmp_path, END_OF_LAST)
    assert extended([user("a"), answer("x")], [user("b")], "</s>").startswith("<turn>user: b")


def test_words_of_an_agent_that_look_like_probes_cut_nothing(tmp_path):
    _, _, extended = renderer(tmp_path, PLAIN)
    said = "fathomanswer fathomnext fathomthought"
    assert extended([user("a"), answer("x")], [user(said)], "</s>") == f"\nuser: {said}</s>\nassistant: "


def test_the_closing_of_a_call_is_the_model_s_own_even_where_it_holds_the_call_s_id(tmp_path):
    made, _, extended = renderer(tmp_path, TOOLED)
    before = [user("a"), answer("", called("run", "{}", "idA"))]
    assert extended(before, [result("ok", "idA")], "</s>") == "tool: ok for idA</s>assistant: "
    assert extended(before, [result("ok", "other")], "</s>") == "tool: ok for other</s>assistant: "
    assert (
        extended([user("a"), answer("x")], [result("ok", "made up")], "a") == "</s>tool: ok for made up</s>assistant: "
    )
    assert isinstance(made.properties.calls, JsonCalls)
    several = [user("a"), answer("", called("run", "[1]", "idA"), called("run", "{", "idB"))]
    both = [result("1", "idB"), result("2", "idA"), user("go")]
    assert extended(several, both, "</s>") == "tool: 1 for idB</s>tool: 2 for idA</s>user: go</s>assistant: "


def test_tools_are_written_where_what_is_appended_depends_on_them(tmp_path):
    _, _, extended = renderer(tmp_path, WITH_TOOLS)
    tools = (Tool(name="a", description="", parameters=msgspec.Raw(b"{}")),) * 2
    assert extended([user("a"), answer("x")], [user("b")], "</s>", tools) == "user: b tools: 2</s>assistant: "


def test_a_message_that_moves_to_the_front_is_refused(tmp_path):
    front = "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    rest = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    made, _, extended = renderer(tmp_path, front + rest + OPENS)
    assert made.properties.uses[Use.SYSTEM]
    with pytest.raises(NotAppendableError, match="a system message in the middle"):
        extended([user("a"), answer("x")], [system("s"), user("b")], "</s>")
    assert extended([user("a"), answer("x")], [user("b")], "</s>") == "user: b</s>assistant: "


def test_a_template_that_numbers_its_turns_from_the_end_is_refused(tmp_path):
    counted = "{% for m in messages %}{{ loop.revindex }} {{ m.role }}: {{ m.content }}</s>{% endfor %}" + OPENS
    made, _, extended = renderer(tmp_path, counted)
    assert not made.properties.appendable
    with pytest.raises(NotAppendableError):
        extended([user("a"), answer("x")], [user("b")], "</s>")


def test_a_template_that_refuses_a_conversation_says_why(tmp_path):
    only = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    made, _, extended = renderer(tmp_path, only + PLAIN)
    with pytest.raises(DataError, match="not that"):
        made.render([user("no")], ())
    with pytest.raises(DataError, match="not that"):
        extended([user("a"), answer("x")], [user("no")], "</s>")


def test_a_model_without_a_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose an instruct model"):
        TurnRenderer(Tokenizer.load(save_tokenizer(tmp_path)))


def test_several_calls_become_messages_with_their_results_behind_them():
    first, second = called("a", "{}", "1"), called("b", "{}", "2")
    rest = [result("two", "2"), result("one", "1"), result("none", "9"), user("u")]
    written = one_call_each([user("q"), answer("hm", first, second, reasoning="so"), *rest])
    assert written == [
        *[user("q"), answer("hm", first, reasoning="so"), result("one", "1")],
        *[answer("", second), result("two", "2"), result("none", "9"), user("u")],
    ]


@needs_shared
@pytest.mark.parametrize(
    ("name", "before", "new", "last", "beginning"),
    [
        ("gpt_oss", [user("a"), answer("x")], [user("b")], "<|return|>", "<|start|>user"),
        ("gpt_oss", [user("a"), answer("x")], [user("b")], "x", "<|end|><|start|>user"),
        ("gpt_oss", [user("a"), answer("", called("run", "{}"))], [result("r")], "<|call|>", "<|start|>functions.run"),
        ("gpt_oss", [user("a"), answer("", called("run", "{"))], [result("r")], "x", "<|call|><|start|>functions.run"),
        ("gpt_oss", [user("a"), answer("", called("run", "{}"))], [user("b")], "<|call|>", "<|start|>user"),
        ("glm_4_6", [user("a"), answer("x")], [user("b")], "<|user|>", "\nb<|assistant|>"),
        ("glm_4_6", [user("a"), answer("x")], [user("b")], "<|endoftext|>", "<|user|>\nb<|assistant|>"),
        ("glm_4_6", [user("a"), answer("x")], [result("r")], "<|observation|>", "\n<tool_response>"),
        ("qwen3", [user("a"), answer("x")], [user("b")], "<|endoftext|>", "\n<|im_start|>user"),
        ("llama3_1_instruct", [user("a"), answer("x")], [user("b")], "<|eot_id|>", "<|start_header_id|>user"),
    ],
)
def test_ends_of_real_templates(name, before, new, last, beginning):
    tokenizer, made, _ = model(name)
    ids = made.extend(before, new, (), tokenizer.encode(last)[-1]).tolist()
    assert "".join(map(tokenizer.decode_token, ids)).startswith(beginning)


@needs_shared
def test_an_answer_that_ended_by_opening_another_turn_is_refused():
    tokenizer, made, _ = model("glm_4_6")
    with pytest.raises(NotAppendableError, match="opens another turn"):
        made.extend([user("a"), answer("x")], [user("b")], (), tokenizer.encode("<|observation|>")[0])


@needs_shared
def test_what_is_appended_does_not_follow_the_history():
    """Counted in messages given to the template, not in time."""
    _, made, _ = model("qwen3")
    history = [message for n in range(200) for message in (user(f"q{n}"), answer("a" * 500))]
    short = made.extend(history[-2:], [user("b")], (), None).tolist()
    assert made.extend(history, [user("b")], (), None).tolist() == short
