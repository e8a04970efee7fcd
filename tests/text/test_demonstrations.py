"""Which tokens of a conversation are imitated, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_tokenizer import save_tokenizer

from fathom.core.errors import ConfigError, DataError
from fathom.text.characters import save_character_tokenizer
from fathom.text.chat.demonstrations import demonstrations
from fathom.text.chat.plain_renderer import PlainRenderer
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer
from synthetic.real_templates import TOOLS, answer, called, model, needs_shared, result, user

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n:?!"
OPENS = "{% if add_generation_prompt %}assistant: {% endif %}"
NO_STOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + OPENS
TWO = [user("a"), answer("b"), user("c"), answer("d")]


def small(folder, template):
    save_tokenizer(folder, letters=LETTERS, config={"chat_template": template})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return Tokenizer.load(folder)


def spelled(tokenizer, row):
    """The row, its imitated tokens in brackets."""
    places = zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True)
    text = "".join(f"[{tokenizer.decode_token(i)}]" if loss else tokenizer.decode_token(i) for i, loss in places)
    return text.replace("][", "")


def test_a_template_without_a_stop_token_has_the_eos_sampled_in_front_of_what_follows(tmp_path):
    tokenizer = small(tmp_path, NO_STOP)
    (row,) = demonstrations(TurnRenderer(tokenizer), TWO, (), "s")
    assert spelled(tokenizer, row) == "user: a\nassistant: [b</s>]\nuser: c\nassistant: [d</s>]"


def test_answers_that_are_context_alone_have_no_loss(tmp_path):
    tokenizer = small(tmp_path, NO_STOP)
    (row,) = demonstrations(TurnRenderer(tokenizer), TWO, (), "s", untrained={1})
    assert spelled(tokenizer, row) == "user: a\nassistant: b</s>\nuser: c\nassistant: [d</s>]"
    (row,) = demonstrations(TurnRenderer(tokenizer), [*TWO, user("e")], (), "s", untrained={3})
    assert spelled(tokenizer, row).startswith("user: a\nassistant: [b</s>]\nuser: c\nassistant: d")
    with pytest.raises(DataError, match="no answer of the assistant to imitate"):
        demonstrations(TurnRenderer(tokenizer), TWO, (), "s", untrained={1, 3})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("a")], "no answer of the assistant"),
        ([answer("a"), user("b")], "begins with the assistant"),
        ([user("a"), answer("b"), answer("c")], "messages 2 and 3 are both the assistant's"),
        ([user("a"), answer(" ")], "message 2, of the assistant, is empty"),
        ([user("a"), answer("b</s>c")], "</s>, which ends a turn, stands in the middle"),
        ([user("a"), answer("b", reasoning="c")], "leaves out or alters part of an answer"),
    ],
)
def test_a_conversation_that_cannot_be_imitated_is_refused(tmp_path, messages, reason):
    with pytest.raises(DataError, match=reason):
        demonstrations(TurnRenderer(small(tmp_path, NO_STOP)), messages, (), "s")


def test_without_a_template_contents_are_joined_and_answers_end_with_the_eos(tmp_path):
    save_character_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (row,) = demonstrations(PlainRenderer(tokenizer), [user("1+1="), answer("2"), user("x"), answer("y")], (), "s")
    assert spelled(tokenizer, row) == "<bos>1+1=[2<eos>]x[y<eos>]"
    as_before = ChatRenderer(tokenizer, use_template=False).render_demonstration(
        [{"role": "user", "content": "1+1="}], "2", "s"
    )
    (row,) = demonstrations(PlainRenderer(tokenizer), [user("1+1="), answer("2")], (), "s")
    assert row.token_ids.tolist() == as_before.token_ids.tolist()
    assert row.loss_mask.tolist() == as_before.loss_mask.tolist()
    whole = PlainRenderer(tokenizer).render([user("1+1="), answer("2"), user("x")], ())
    assert spelled(tokenizer, row).replace("[", "").replace("]", "") + "x" == "".join(
        map(tokenizer.decode_token, whole.tolist())
    )


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([user("1"), answer("2")], TOOLS),
        ([user("1"), answer("", called("run", "{}"))], ()),
        ([user("1"), answer("2", reasoning="3")], ()),
        ([user("1"), answer("2"), result("3"), answer("4")], ()),
    ],
)
def test_without_a_template_there_are_no_tools_and_no_thoughts(tmp_path, messages, tools):
    save_character_tokenizer(tmp_path)
    with pytest.raises(DataError, match="need a chat template"):
        demonstrations(PlainRenderer(Tokenizer.load(tmp_path)), messages, tools, "s")


def test_without_a_template_and_without_an_eos_nothing_can_be_shown(tmp_path):
    save_tokenizer(tmp_path, config={"eos_token": None})
    with pytest.raises(ConfigError, match="names no eos_token"):
        PlainRenderer(Tokenizer.load(tmp_path))


@needs_shared
def test_an_answer_that_begins_with_newlines_keeps_its_ids_and_those_of_the_prompt():
    _, renderer, _ = model("qwen2_5_instruct")
    (row,) = demonstrations(renderer, [user("a"), answer("\n\nHello")], (), "s")
    assert row.token_ids.tolist()[-6:] == [151644, 77091, 198, 271, 9707, 151645]
    assert np.flatnonzero(row.loss_mask).tolist() == [len(row.token_ids) + at for at in (-3, -2, -1)]
