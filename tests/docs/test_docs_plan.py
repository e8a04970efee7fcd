"""The figures on the page about transports are those that the plan says now."""

from __future__ import annotations

import re

from markdown_pages import ROOT

from fathom.sync.plan.crossover import largest_share
from fathom.sync.plan.fabric import FABRICS
from fathom.sync.plan.published import Checked, check

PAGE = (ROOT / "docs" / "concepts" / "choosing-a-transport.md").read_text(encoding="utf-8")
H100 = FABRICS["infiniband-h100"]


def cells(checked: Checked) -> str:
    error = "fitted" if checked.fitted else f"{checked.error * 100:+.0f} %"
    return f"{checked.published_s * 1e3:,.1f} | {checked.predicted_s * 1e3:,.1f} | {error}"


def test_every_figure_stands_on_the_page_with_its_prediction_and_error() -> None:
    rows = check()
    for broadcast, p2p in zip(rows[::2], rows[1::2], strict=True):
        nodes = f"{broadcast.nodes} + {broadcast.nodes}"
        assert f"| {broadcast.model} | {nodes} | {cells(broadcast)} | {cells(p2p)} |" in PAGE


def test_the_constants_and_the_summary_are_right() -> None:
    assert f"takes {H100.chain_s * 1e6:.1f} microseconds longer" in PAGE
    assert H100.layout_bytes_per_s is not None
    assert f"lays tensors out at {H100.layout_bytes_per_s / 1e9:.2f} GB/s" in PAGE
    predicted = [row for row in check() if not row.fitted]
    several = [row for row in predicted if row.nodes > 1]
    mean, mean_several = (sum(abs(row.error) for row in rows) / len(rows) for rows in (predicted, several))
    assert f"The other {len(predicted)} figures" in PAGE
    assert re.search(rf"is {mean * 100:.0f} % off, {mean_several * 100:.0f} % on two nodes and more", PAGE)
    assert f"less than {(largest_share(H100) or 0) * 100:.0f} % of the model" in PAGE
