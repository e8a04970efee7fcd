"""Rows of files as conversations and as pairs: what is understood, and what is refused with file and row."""

from __future__ import annotations

import json

import pytest

from fathom.core.errors import DataError
from fathom.core.records.message import Role
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.envs.conversations import read_conversations, read_pairs
from fathom.envs.written_rows import write_rows
from synthetic.real_templates import SHARED, needs_shared


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(role, content, **more):
    return {"role": role, "content": content, **more}


ASK, ANSWER = said("user", "a"), said("assistant", "b")
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": {"path": "é"}}}
TOOL = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}


def test_a_conversation_with_tools_and_thoughts(tmp_path):
    asks = said("assistant", None, tool_calls=[CALL], reasoning_content="hm")
    result, done = said("tool", "ok", tool_call_id="c1"), said("assistant", "done", weight=0)
    path = written(tmp_path, {"messages": [said("developer", "be"), ASK, asks, result, done], "tools": [TOOL]})
    (row,) = read_conversations(path)
    assert [each.role for each in row.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert (row.messages[2].reasoning, row.messages[2].tool_calls[0].parsed) == ("hm", {"path": "é"})
    assert (row.tools[0].name, row.tools[0].description) == ("run", "Runs.")
    assert row.untrained == {4}
    assert row.source.endswith("rows.jsonl: row 1")


def test_prompt_and_completion_and_parts_of_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = written(
        tmp_path, {"prompt": "1+1=", "completion": "2"}, {"messages": json.dumps([said("user", parts), ANSWER])}
    )
    first, second = read_conversations(path)
    assert [(each.role, each.content) for each in first.messages] == [(Role.USER, "1+1="), (Role.ASSISTANT, "2")]
    assert second.messages[0].content == "ab"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "neither messages nor prompt and completion; columns found: text"),
        ({"messages": [said("gpt", "x")]}, "message 1 has role 'gpt'"),
        ({"messages": ["x"]}, "not a list of messages"),
        ({"messages": [ASK, said("assistant", [{"type": "image_url"}])]}, "a part of type 'image_url'"),
        ({"messages": [ASK, said("assistant", None, function_call={"name": "f"})]}, "write it as tool_calls"),
        ({"messages": [said("user", "x", reasoning="y")]}, "which only the assistant does"),
        ({"messages": [ASK, said("assistant", "x", weight=0.5)]}, "weight 0.5"),
        (
            {"messages": [ASK, said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
            "arguments that are no JSON object",
        ),
        ({"messages": [ASK, ANSWER], "tools": [{}]}, "a tool has no name"),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason) as refused:
        read_conversations(written(tmp_path, {"messages": [ASK, ANSWER]}, row))
    assert "rows.jsonl: row 2" in str(refused.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"messages": [ASK], "chosen": ANSWER, "rejected": said("assistant", "c")},
        {"prompt": "a", "chosen": [ASK, ANSWER], "rejected": [ASK, said("assistant", "c")]},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, said("assistant", "c")]},
    ],
)
def test_ways_to_write_a_pair(tmp_path, row):
    (pair,) = read_pairs(written(tmp_path, row))
    assert [each.content for each in (*pair.prompt, *pair.chosen, *pair.rejected)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "chosen is empty"),
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ({"chosen": [ASK, ANSWER], "rejected": [said("user", "z"), ANSWER]}, "prompts of chosen and rejected differ"),
        ({"prompt": "a", "chosen": [said("user", "z"), ANSWER], "rejected": "c"}, "chosen answers another prompt"),
        ({"prompt": [ASK, ANSWER], "chosen": "b", "rejected": "c"}, "does not end with a message that the assistant"),
        (
            {"chosen": [ASK, ANSWER, said("user", "x"), ANSWER], "rejected": [ASK, ANSWER, said("user", "y"), ANSWER]},
            "another prompt than the other side's",
        ),
    ],
)
def test_a_pair_that_says_nothing_is_refused(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason) as refused:
        read_pairs(written(tmp_path, row))
    assert "rows.jsonl: row 1" in str(refused.value)


def test_tasks_are_written_as_rows(tmp_path):
    environment = Arithmetic(ArithmeticOptions(num_train=30, num_eval=5, max_operand=9))
    write_rows(environment, tmp_path / "sft", pairs=False, seed=0)
    write_rows(environment, tmp_path / "dpo", pairs=True, seed=0)
    shown = read_conversations(tmp_path / "sft" / "train.jsonl")
    pairs = read_pairs(tmp_path / "dpo" / "train.jsonl")
    assert len(shown) == len(pairs) == 30
    for task, row, pair in zip(environment.tasks(), shown, pairs, strict=True):
        assert row.messages[-1].content == pair.chosen[0].content == task.answer
        assert environment.grade(task, pair.rejected[0].content).total == 0.0
    with pytest.raises(DataError, match="exists"):
        write_rows(environment, tmp_path / "dpo", pairs=True, seed=0)


@needs_shared
def test_rows_of_the_wild_are_read():
    rows = read_conversations(SHARED / "data" / "tinker_conversations_first20.jsonl")
    assert len(rows) == 20
    assert all(row.messages[-1].role is Role.ASSISTANT for row in rows)
