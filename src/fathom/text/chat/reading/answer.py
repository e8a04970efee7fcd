"""An answer as most templates write it: a thought between marks, words, and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from fathom.text.chat.reading.calls import CallReader, Part, Spoken, Thought, find_first, held, may_begin
from fathom.text.chat.reading.written import ThoughtsWritten


@final
class MarkedAnswer:
    """Reads an answer. Whitespace between a thought, words and calls belongs to none of them."""

    def __init__(
        self,
        thoughts: ThoughtsWritten | None,
        opens: Sequence[str],
        between: str,
        new_call: Callable[[], CallReader] | None,
    ) -> None:
        """See below.

        Args:
            thoughts: marks of what is thought. None: there are none.
            opens: marks that begin a call. Empty: an answer that begins with `{` is one.
            between: a mark behind calls that is not told. Empty: none.
            new_call: makes the reader of one call. None: calls are not looked for.
        """
        self._thoughts = thoughts
        self._opens = opens
        self._between = between
        self._new_call = new_call
        self._call: CallReader | None = None
        self._text = ""
        self._state: Callable[[bool], list[Part]] = self._lead
        if thoughts is None:
            self._state = self._begin
        elif thoughts.opened_by_prompt:
            self._state = self._thought_begin

    def feed(self, text: str) -> list[Part]:
        """Read on."""
        self._text += text
        return self._run(final=False)

    def end(self) -> list[Part]:
        """What was held back."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Part]:
        events: list[Part] = []
        while self._text or (final and self._call is not None):
            before, state = self._text, self._state
            events += state(final)
            if self._text == before and self._state == state:
                break
        return events

    # Thoughts -----------------------------------------------------------------------------------------------------

    def _lead(self, final: bool) -> list[Part]:
        assert self._thoughts is not None
        front = self._text.lstrip()
        if front.startswith(self._thoughts.opens):
            self._text, self._state = front.removeprefix(self._thoughts.opens), self._thought_begin
        elif final or not may_begin(front, self._thoughts.opens):
            self._state = self._begin
        return []

    def _thought_begin(self, final: bool) -> list[Part]:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._state = self._thought
        return []

    def _thought(self, final: bool) -> list[Part]:
        assert self._thoughts is not None
        thought, mark, rest = self._text.partition(self._thoughts.closes)
        if mark:
            self._text, self._state = rest, self._thought_end
            return _thought(thought.rstrip("\n"))
        ready = len(thought) - held(thought, [self._thoughts.closes])
        ready = len(thought) if final else len(thought[:ready].rstrip("\n"))
        self._text = thought[ready:]
        return _thought(thought[:ready])

    def _thought_end(self, final: bool) -> list[Part]:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._state = self._begin
        return []

    # Words and calls ----------------------------------------------------------------------------------------------

    def _begin(self, final: bool) -> list[Part]:
        if self._new_call is None or self._opens:
            self._state = self._words
        elif front := self._text.lstrip():
            if front.startswith("{"):
                self._open(front)
            else:
                self._state = self._words
        elif final:
            self._state = self._words
        return []

    def _words(self, final: bool) -> list[Part]:
        text = self._text
        if self._new_call is None or not self._opens:
            self._text = ""
            return _spoken(text)
        found = find_first(text, self._opens)
        if found is not None:
            self._open(text[found[0] :])
            return _spoken(text[: found[0]].rstrip())
        ready = len(text) if final else len(text[: len(text) - held(text, self._opens)].rstrip())
        self._text = text[ready:]
        return _spoken(text[:ready])

    def _open(self, text: str) -> None:
        assert self._new_call is not None
        self._text, self._call, self._state = text, self._new_call(), self._within

    def _within(self, final: bool) -> list[Part]:
        assert self._call is not None
        step = self._call.step(self._text, final=final)
        self._text = step.rest
        failed = any(isinstance(event, Spoken) for event in step.events)
        if step.done or final:
            self._call = None
            self._state = self._words if failed else self._behind
        return [event for event in step.events if not isinstance(event, Spoken) or event.text]

    def _behind(self, final: bool) -> list[Part]:
        """Behind a call: whitespace, another call, words."""
        front = self._text.lstrip()
        if self._between and front.startswith(self._between):
            front = front.removeprefix(self._between).lstrip()
        if final and not front:
            self._text = ""
        elif front and (final or not may_begin(front, self._between)):
            separated = front.lstrip(",; \n") if not self._opens else front
            if not self._opens and separated.startswith("{"):
                self._open(separated)
            elif separated or final:
                self._text, self._state = front, self._words
        return []


def _thought(text: str) -> list[Part]:
    return [Thought(text)] if text else []


def _spoken(text: str) -> list[Part]:
    return [Spoken(text)] if text else []
