"""Every relative link leads somewhere, and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, anchors, name_of, prose_of, text_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE_PATH = re.compile(r"`((?:fathom|docs|recipes)/[\w./-]+)`")


def targets(page: Path) -> list[tuple[Path, str]]:
    """(file or folder, anchor) of each relative link."""
    links = [link for link in LINK.findall(prose_of(page)) if "://" not in link]
    parts = [link.partition("#") for link in links]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in targets(page):
        assert target.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to #{anchor} of {name_of(target)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_code_are_there(page: Path) -> None:
    for path in SOURCE_PATH.findall(text_of(page)):
        assert (ROOT / "src" / path).exists() or (ROOT / path).exists(), f"{name_of(page)} names {path}"


def test_every_page_is_linked() -> None:
    linked = {target for page in PAGES for target, _ in targets(page)}
    listed = {path for folder in linked if folder.is_dir() for path in folder.glob("*.md")}
    assert not [name_of(page) for page in PAGES if page not in linked | listed | {ROOT / "README.md"}]


def test_the_pages_speak_of_the_project_alone() -> None:
    for page in PAGES:
        assert not re.search(r"/tmp/|/home/|/root/|DESIGN\.md|\bissue \d", text_of(page)), name_of(page)
