"""The messages that the troubleshooting page explains are messages that the code says."""

from __future__ import annotations

import re

from markdown_pages import ROOT, text_of

import fathom.core.errors

PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
FIRST_COLUMN = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
BETWEEN_LITERALS = re.compile(r'"\s*\n\s*(?:\+ )?f?"')


def source() -> str:
    """All of the code, with strings that go on in the next line made whole."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return BETWEEN_LITERALS.sub("", text)


def fixed_parts(message: str) -> list[str]:
    """The parts that are the same whatever the case: at least two words."""
    parts = [part.strip() for part in re.split(r"\.\.\.|[:;=?]|\bFILE\b|\brow N\b", message)]
    return [part for part in parts if " " in part]


def test_every_message_is_said_somewhere() -> None:
    said = source()
    messages = FIRST_COLUMN.findall(text_of(PAGE))
    assert sum(len(fixed_parts(message)) for message in messages) > 10
    assert not [(message, part) for message in messages for part in fixed_parts(message) if part not in said]


def test_every_error_named_exists() -> None:
    known = {name for name in vars(fathom.core.errors) if name.endswith("Error")}
    named = set(re.findall(r"`(\w+Error)`", text_of(PAGE)))
    assert named <= known
