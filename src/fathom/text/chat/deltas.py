"""What becomes known of an answer while its tokens arrive. Joined in order, the parts of a kind are the whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what is said."""

    text: str
    """Whole characters, at least one."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what is thought."""

    text: str
    """Whole characters, at least one."""


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The model asks for a tool."""

    index: int
    """Which call of this answer, from 0."""
    id: str
    """Names the call."""
    name: str
    """The tool."""


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of a call's arguments."""

    index: int
    """Which call, begun before."""
    text: str
    """Part of the arguments' text, at least one character."""


Delta = TextDelta | ReasoningDelta | ToolCallBegun | ToolArgumentsDelta
