"""Rows of demonstrations are the rows that a session leaves in which the model said exactly that."""

import asyncio

import pytest
from template_sessions import opened

from fathom.core.errors import DataError
from fathom.core.records.message import Role
from fathom.rollout.session.call import TurnCall
from fathom.text.chat.demonstrations import demonstrations
from synthetic.real_templates import TEMPLATES, TOOLS, answer, called, model, needs_shared, result, system, user

pytestmark = needs_shared

CONVERSATIONS = {
    "words": ([system("be"), user("a"), answer("b c"), user("d"), answer("\n\ne"), user("f"), answer("hello")], ()),
    "thoughts": ([user("a"), answer("b c", reasoning="hm"), user("d"), answer("e", reasoning="so")], ()),
    "tools": (
        [
            user("a"),
            answer("", called("run", '{"path": "x"}', "abcdef001")),
            result("ok", "abcdef001"),
            answer("", called("read_file", '{"path": "é"}', "abcdef002")),
            result("no", "abcdef002"),
            answer("done"),
            user("more"),
            answer("yes"),
        ],
        TOOLS,
    ),
    "words beside calls": (
        [
            user("a"),
            answer("look", called("run", '{"path": "x"}')),
            result("ok"),
            answer("done"),
            user("b"),
            answer("c"),
        ],
        TOOLS,
    ),
    "thoughts and tools": (
        [
            user("a"),
            answer("", called("run", '{"path": "x"}'), reasoning="t1"),
            result("ok"),
            answer("done", reasoning="t2"),
            user("more"),
            answer("yes", reasoning="t3"),
        ],
        TOOLS,
    ),
}
REFUSED = {
    "qwen2_5_instruct": {"thoughts", "thoughts and tools"},
    "qwen3_instruct_2507": {"thoughts", "thoughts and tools"},
    "qwen3_coder": {"thoughts", "thoughts and tools"},
    "llama3_1_instruct": {"thoughts", "words beside calls", "thoughts and tools"},
    "gpt_oss": {"words beside calls", "thoughts and tools"},
    "deepseek_v3": set(CONVERSATIONS),
    "deepseek_v3_1": {"thoughts", "thoughts and tools"},
}
"""The template leaves out what was thought or said, or opens an answer otherwise than it writes it."""


async def spoken(name, messages, tools, rows):
    """The record of a session in which an agent sends these messages and the model answers what the rows show."""
    session, _ = opened(name, *(run for row in rows for run in runs(row)))
    history = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            heard = [each async for each in session.answer(TurnCall(messages=tuple(history), tools=tools))]
            message = heard[-1].message
        history.append(message)
    return await session.close()


def runs(row):
    """The ids of each answer of a row."""
    found, before = [], False
    for token_id, has_loss in zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if has_loss:
            found = found if before else [*found, []]
            found[-1].append(token_id)
        before = has_loss
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rows_are_those_of_a_session(name):
    tokenizer, renderer, _ = model(name)
    for kind, (messages, tools) in CONVERSATIONS.items():
        if kind in REFUSED.get(name, set()):
            with pytest.raises(DataError, match=r"the chat template (leaves out|opens an answer)"):
                demonstrations(renderer, messages, tools, kind)
            continue
        rows = demonstrations(renderer, messages, tools, kind)
        closed = asyncio.run(spoken(name, messages, tools, rows))
        branches = [(branch.token_ids.tolist(), branch.loss_mask.tolist()) for branch in closed.payload.branches]
        assert [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in rows] == branches, kind
        said = [ids for row in rows for ids in runs(row)]
        assert len(said) == sum(message.role is Role.ASSISTANT for message in messages)
        assert all(ids[-1] in tokenizer.special.stop_ids for ids in said), "each answer shows how it ends"
        for ids, message in zip(said, [each for each in messages if each.role is Role.ASSISTANT], strict=True):
            assert message.content.strip() in tokenizer.decode(ids)
