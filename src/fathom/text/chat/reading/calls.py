"""What readers of answers and of single calls have in common: text in, events out, undecided text handed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final


@final
@dataclass(frozen=True, slots=True)
class Named:
    """Which tool is called."""

    name: str
    """Not empty."""


@final
@dataclass(frozen=True, slots=True)
class Written:
    """More of its arguments."""

    text: str
    """At least one character."""


@final
@dataclass(frozen=True, slots=True)
class Spoken:
    """No call can be made of it: plain text."""

    text: str
    """As it was sampled, its marks included; may be empty."""


@final
@dataclass(frozen=True, slots=True)
class Thought:
    """More of what is thought. Never part of a call."""

    text: str
    """At least one character."""


Event = Named | Written | Spoken
"""What may come of a call."""
Part = Event | Thought
"""What an answer is made of."""


@final
@dataclass(frozen=True, slots=True)
class Step:
    """What came of the text at hand."""

    events: Sequence[Event]
    """What is known now."""
    rest: str
    """To be given again, with more behind it; or, when done, what is not part of the call."""
    done: bool
    """The call is over."""


class CallReader(Protocol):
    """Reads one call, from its opening mark on."""

    def step(self, text: str, *, final: bool) -> Step:
        """Read on. `final`: nothing follows; the step is then the last."""
        ...


def held(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of `marks` may begin, not all of it there."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Place of the mark that comes first, and the mark; of two at one place, the longer. Empty ones are not meant."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark and mark in text]
    if not found:
        return None
    place, _, mark = min(found)
    return place, mark


def may_begin(text: str, mark: str) -> bool:
    """`text` is a proper beginning of `mark`."""
    return len(text) < len(mark) and mark.startswith(text)
