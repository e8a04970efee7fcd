"""The reference pages are what the code says now."""

from __future__ import annotations

import re

import pytest
from markdown_pages import ROOT

from fathom.apps.reference import PAGES
from fathom.bench.workloads import WORKLOADS
from fathom.config.load import option_names
from fathom.envs.registry import BUILT_IN

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    written = (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
    assert written == PAGES[name](), f"run: python -m fathom.apps.reference {name} > docs/reference/{name}.md"


def test_every_option_is_on_the_page() -> None:
    page = PAGES["options"]()
    assert not [name for name in option_names() if f"| `{name}` |" not in page]
    assert not [kind for kind in BUILT_IN if f'`task.kind = "{kind}"`' not in page]
    assert not [name for name in WORKLOADS if f"`fathom bench {name}`" not in page]


def test_sections_show_their_own_defaults() -> None:
    page = PAGES["options"]()
    assert "| `warm_start.optimizer.lr` | float, > 0 | `0.001` |" in page
    assert "| `trainer.optimizer.lr` | float, > 0 | `1e-05` |" in page
    assert re.search(r"\| `trainer\.steps` \| int[^|]* \| required \|", page)
