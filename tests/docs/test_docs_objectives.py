"""The page on objectives says of each what its declaration says."""

from __future__ import annotations

from markdown_pages import ROOT

from fathom.config.objectives import OBJECTIVES


def test_every_objective_is_on_the_page_with_its_formula_and_denominators() -> None:
    page = (ROOT / "docs" / "concepts" / "objectives.md").read_text(encoding="utf-8")
    flowing = " ".join(page.split())
    for kind, declaration in OBJECTIVES.items():
        assert f"| `{kind}` | {declaration.sentence} |" in page
        assert declaration.formula in page
        assert declaration.denominators in flowing
