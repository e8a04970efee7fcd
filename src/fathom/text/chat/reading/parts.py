"""Pieces of an answer that are no calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Thought:
    """More of what is thought."""

    text: str
    """At least one character."""


Part = Thought
