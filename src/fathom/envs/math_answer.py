"""Is this answer the same number, expression or set as the reference? And was there an answer at all?"""

from __future__ import annotations

import logging
import re
from collections import deque
from decimal import Decimal
from importlib.metadata import version
from typing import Any

from math_verify import parse, verify

from fathom.core.records.trajectory import Graded

GRADER = f"math_answer/1 math-verify {version('math-verify')}"

# math-verify warns that its own timeouts are off. They use signals; the grader's deadline kills the process instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_SAID = re.compile(r"(?:final\s+)?answer(?:\s+is\b\s*:?|\s*:)\**[ \t]*", re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CLEAN = (
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\{,\}(?=\d{3})"), ","),
    (re.compile(r"\\[!,;: ()\[\]]|\\?[$€£]|\\(?=%)|^[*\s]+|[*\s]+$"), ""),
    (re.compile("[−–]"), "-"),
)
_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")
_END = re.compile(r"[\s.,;:!?]*$")
_WORDS = re.compile(
    r"[.,;:!?]?\s+(?!(?:pi|sqrt|log|ln|sin|cos|tan|exp|mod|times|over|choose)\b|(?:and|or|to)\s+[-\d$\\(])[A-Za-z]{2,}"
    r"|(?!sqrt|log|sin|cos|tan|exp|mod)[A-Za-z]{3,}|(?:mm|cm|km|mg|kg|ml|ft|am|pm|st|nd|rd|th)\b"
)


def grade_math(reference: str, text: str) -> Graded:
    """1 when the last answer in `text` equals `reference`, else 0; `answer_found` says whether there was one.

    The answer is the last marked one (`#### 42`, `\\boxed{42}`), or else what follows the last `answer is` or
    `Answer:`, or else the last number or expression of the text. `reference` may be a worked solution that marks its
    answer.
    """
    gold = reference_answer(reference)
    marked = marked_answer(text)
    if marked is not None:
        return _graded(_same(gold, marked, _parse_whole(marked)))
    for passage in (_said(text), text):
        parsed = _parse(passage)
        if parsed or plain_number(passage, words=True) is not None:
            return _graded(_same(gold, passage, parsed))
    return _graded(equal=False, found=False)


def reference_answer(reference: str) -> str:
    """The marked answer of a worked solution, or all of the text. Empty: there is none."""
    return (marked_answer(reference) or reference).strip()


def marked_answer(text: str) -> str | None:
    """What follows the last `####` on its line, or is in the last box, whichever is later. None: neither."""
    marked = [*_after_hashes(text), *_in_boxes(text)]
    return max(marked)[1] if marked else None


def plain_number(text: str, *, words: bool) -> Decimal | None:
    """The number that `text` is, with a currency sign and separators if it likes. None: it is none, or more than one.

    With `words`, they may follow (`18 dollars`), but no mathematics (`18 pi`, `18x`, `18/2`).
    """
    for pattern, replacement in _CLEAN:
        text = pattern.sub(replacement, text)
    number = _NUMBER.match(text)
    if number is None or not (_END.match(text, number.end()) or (words and _WORDS.match(text, number.end()))):
        return None
    return Decimal(number[1] + number[2].replace(",", ""))


def _graded(equal: bool, found: bool = True) -> Graded:
    return Graded(components={"correct": float(equal)}, grader=GRADER, answer_found=found)


def _same(gold: str, found: str, parsed: list[Any]) -> bool:
    """Numbers are compared exactly; anything else by what math-verify parsed."""
    gold_number, found_number = plain_number(gold, words=False), plain_number(found, words=True)
    if gold_number is not None and found_number is not None:
        return gold_number == found_number
    return verify(_parse_whole(gold), parsed, timeout_seconds=None)


def _parse_whole(answer: str) -> list[Any]:
    """All of `answer` as one expression."""
    return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list[Any]:
    """The last expression that math-verify finds in `text`: its sympy form and its text. Empty: none."""
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # None is its documented "off"


def _said(text: str) -> str:
    """The rest of the line after the last `answer is` or `Answer:`. Empty: nowhere."""
    last = deque(_SAID.finditer(text), maxlen=1)
    return text[last[0].end() :].partition("\n")[0] if last else ""


def _after_hashes(text: str) -> list[tuple[int, str]]:
    """(position, rest of the line) after each `####`."""
    marks = re.finditer(r"####((?:(?!####)[^\n])*)", text)
    return [(mark.start(), mark[1].strip()) for mark in marks if mark[1].strip()]


def _in_boxes(text: str) -> list[tuple[int, str]]:
    """(position, content) of each box whose braces are balanced."""
    boxes: list[tuple[int, str]] = []
    for mark in _BOXED.finditer(text):
        depth = 1
        for end in range(mark.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                if content := text[mark.end() : end].strip():
                    boxes.append((mark.start(), content))
                break
    return boxes
