"""The options of `fathom sft` and `fathom dpo`, and combinations that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.config.load import option_names
from fathom.core.errors import ConfigError
from fathom.run.tuning.plan import KINDS, parse_tuning

LISTS = Path(__file__).parents[1] / "arch"
LEAST = {"name": "x", "model": {"tiny": "arithmetic"}, "data": {"train": ["x.jsonl"]}, "trainer": {"steps": 1}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_options_are_these(kind):
    """Adding an option edits the list in the same change."""
    listed = (LISTS / f"options_{kind}.txt").read_text().split()
    assert option_names(KINDS[kind]) == listed
    assert len(listed) <= 70


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"tiny": "arithmetic", "path": "x"}}, "exactly one of path and tiny"),
        ({"trainer": {}}, "exactly one of epochs and steps"),
        ({"trainer": {"steps": 1, "epochs": 1}}, "exactly one of epochs and steps"),
        ({"data": {"train": []}}, "data.train"),
        ({"data": {"train": ["x"], "held_out": "y", "held_out_share": 0.1}}, "both say what is held out"),
        ({"lora": {"publish": "merged"}}, "lora.publish is for engines"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"trainer": {"steps": 1, "groups_per_step": 2}}, "unknown option trainer.groups_per_step"),
        ({"rollout": {}}, "a run for fathom train"),
    ],
)
def test_what_has_no_meaning_is_refused(kind, change, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_tuning(LEAST | change, "test", kind)


def test_kinds_have_their_own_rules():
    with pytest.raises(ConfigError, match="set both or neither"):
        parse_tuning(LEAST | {"objective": {"aggregation": "seq_mean_token_sum_norm"}}, "test", "sft")
    with pytest.raises(ConfigError, match=r"objective\.label_smoothing"):
        parse_tuning(LEAST | {"objective": {"label_smoothing": 0.5}}, "test", "dpo")
    with pytest.raises(ConfigError, match="start it with fathom dpo"):
        parse_tuning(LEAST | {"kind": "dpo"}, "test", "sft")
