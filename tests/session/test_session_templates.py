"""Sessions with real templates: what was sampled stays as it was sampled, whatever text it stands for."""

import asyncio

import pytest
from template_sessions import opened

from fathom.rollout.session.call import TurnCall
from synthetic.real_templates import TOOLS, model, needs_shared, result, user

pytestmark = needs_shared


async def converse(session, engine, *followers):
    """Ask, and go on with what each of the followers says behind the answers. The ids of each request; the record."""
    history = [user("a")]
    for follow in [*followers, None]:
        heard = [each async for each in session.answer(TurnCall(messages=tuple(history), tools=TOOLS))]
        message = heard[-1].message
        history += [message, *(follow(message) if follow is not None else [])]
    return [request.prompt_ids.tolist() for request in engine.requests], await session.close(), history


HELLO, NEWLINES = [383, 75, 385], [198, 198]
"""Written as one token each: `hello` and a blank line."""


@pytest.mark.parametrize("odd", ["hello", "newlines", "half an emoji"])
def test_ids_that_do_not_encode_to_themselves_survive_three_turns(odd):
    tokenizer, _, _ = model("qwen2_5_instruct")
    ids = {"hello": HELLO, "newlines": NEWLINES, "half an emoji": tokenizer.encode("🜁")[:-1]}[odd]
    end = tokenizer.encode("<|im_end|>")
    assert tokenizer.encode(tokenizer.decode(ids)) != ids
    answers = [[*ids, *end], [*ids, *ids, *end], [*ids, *end]]
    say = lambda _: [user("next")]  # noqa: E731
    session, engine = opened("qwen2_5_instruct", *answers)
    sent, closed, _ = asyncio.run(converse(session, engine, say, say))
    between = tokenizer.encode("\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")
    assert sent[1] == [*sent[0], *answers[0], *between]
    assert sent[2] == [*sent[1], *answers[1], *between]
    (branch,) = closed.payload.branches
    assert branch.token_ids.tolist() == [*sent[2], *answers[2]]
    assert branch.token_ids[branch.loss_mask].tolist() == [each for answer in answers for each in answer]


def test_malformed_arguments_break_no_later_turn():
    tokenizer, _, _ = model("qwen3_coder")
    call = tokenizer.encode("<tool_call>\n<function=run>\n<parameter=path>\na")
    fine = tokenizer.encode("done<|im_end|>")
    answer = lambda message: [result("bad call", message.tool_calls[0].id)]  # noqa: E731
    session, engine = opened("qwen3_coder", call, fine)
    sent, closed, history = asyncio.run(converse(session, engine, answer))
    assert history[1].tool_calls[0].parsed is None
    assert sent[1][: len(sent[0]) + len(call)] == [*sent[0], *call]
    assert tokenizer.decode_token(sent[1][len(sent[0]) + len(call)]) == "<|im_end|>", "the turn was not ended by itself"
    assert len(closed.payload.branches) == 1


def test_a_stop_token_that_opens_the_next_turn_is_there_once():
    tokenizer, _, _ = model("glm_4_6")
    called = tokenizer.encode("\n<think></think>\n<tool_call>run\n</tool_call><|observation|>")
    said = tokenizer.encode("\n<think></think>\nyes<|user|>")
    session, engine = opened("glm_4_6", called, said, said)
    answer = lambda message: [result("ok", message.tool_calls[0].id)]  # noqa: E731
    sent, closed, _ = asyncio.run(converse(session, engine, answer, lambda _: [user("more")]))
    text = "".join(map(tokenizer.decode_token, sent[2]))
    assert text.count("<|observation|>") == 1
    assert text.endswith("yes<|user|>\nmore<|assistant|>")
    assert len(closed.payload.branches) == 1


def test_a_thought_that_the_template_deletes_opens_a_row_of_the_templates_own_context():
    tokenizer, renderer, _ = model("qwen3")
    thought = tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    session, engine = opened("qwen3", thought, thought)
    sent, closed, history = asyncio.run(converse(session, engine, lambda _: [user("more")]))
    assert sent[1] == renderer.render(history[:3], TOOLS).tolist()
    assert "hm" not in tokenizer.decode(sent[1])
    assert closed.rendered_whole == 1
    assert len(closed.payload.branches) == 2
