"""What the pages about tuning show is understood."""

from __future__ import annotations

import tomllib

from markdown_pages import ROOT, blocks

from fathom.envs.conversations import read_conversations, read_pairs
from fathom.run.tuning.plan import parse_tuning

HOW_TO = ROOT / "docs" / "how-to"


def test_the_shown_rows_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    (block,) = blocks("json", HOW_TO / "fine-tune.md")
    path.write_text(block.text)
    (row,) = read_conversations(path)
    assert [len(message.tool_calls) for message in row.messages] == [0, 1, 0, 0]
    (block,) = blocks("json", HOW_TO / "preferences.md")
    path.write_text(block.text)
    (pair,) = read_pairs(path)
    assert (pair.chosen[0].content, pair.rejected[0].content) == ("80", "84")


def test_the_recipes_are_valid():
    for kind in ("sft", "dpo"):
        tree = tomllib.loads((ROOT / "recipes" / f"{kind}.toml").read_text())
        assert parse_tuning(tree, kind, kind).name == kind
