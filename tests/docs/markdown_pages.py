"""The pages that people read, and what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `name` is that of the file which its first line names in a comment; empty: none."""

    page: Path
    language: str
    text: str
    name: str

    @property
    def id(self) -> str:
        return f"{name_of(self.page)}:{self.name or self.text.strip().splitlines()[0][:40]}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """A page without its comments."""
    return _COMMENT.sub("", page.read_text(encoding="utf-8"))


def prose_of(page: Path) -> str:
    """A page without comments and fenced blocks."""
    return _FENCE.sub("", text_of(page))


def blocks(language: str, page: Path | None = None) -> list[Block]:
    """The blocks in a language, on one page or on all."""
    pages = PAGES if page is None else [page]
    return [
        Block(
            page=page, language=found, text=text, name=named[1] if (named := re.match(r"# (\S+\.\w+)\n", text)) else ""
        )
        for page in pages
        for found, text in _FENCE.findall(text_of(page))
        if found == language
    ]


def code_lines(page: Path) -> list[str]:
    """Everything on a page that may be a command: lines of shell blocks, indented lines, inline code."""
    shell = [line for block in blocks("bash", page) for line in block.text.replace("\\\n", " ").splitlines()]
    found = [*shell, *_INDENTED.findall(prose_of(page)), *_INLINE.findall(prose_of(page))]
    return [line.partition(" #")[0].strip() for line in found]


def anchors(page: Path) -> set[str]:
    """What a link may name on a page, as GitHub makes it from the headings."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose_of(page)))
    return {heading.strip().replace(" ", "-") for heading in kept}
