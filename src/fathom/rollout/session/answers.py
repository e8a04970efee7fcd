"""Answers on their way and given: who hears them, and which of them a call that is sent again is given.

retry key known ─────────────────────────> that answer
equal call, its answer never heard whole > that answer, from its beginning
equal call, and the client says "resent" > the last one, also if it was sent: it was lost on its way
anything else ───────────────────────────> a new one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import final

from fathom.core.records.message import Message
from fathom.core.records.sampling import FinishReason
from fathom.rollout.session.call import CallRefusedError, Heard, Refusal, TurnBegan, TurnCall, TurnEnded
from fathom.text.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun


@final
class Answer:
    """One answer, for whoever hears it: also for a caller that comes back after it lost the line."""

    def __init__(self, key: bytes, begun_s: float) -> None:
        """`key`: identity of the call. `begun_s`: when it was asked for, by the session's clock."""
        self.key = key
        self.news_s = begun_s
        """When the engine was last heard of: its newest token, or the beginning."""
        self.task: asyncio.Task[None] | None = None
        """What samples it."""
        self.sampled_tokens = 0
        """Tokens sampled until now."""
        self._parts: list[Heard] = []
        self._whole: TurnEnded | None = None
        self._failure: Exception | None = None
        self._ended = False
        self._told = False
        self._listeners = 0
        self._news: asyncio.Event | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will be told."""
        return self._ended

    @property
    def is_good(self) -> bool:
        """It may be given to a call that is sent again: it runs, or ended well."""
        aborted = self._whole is not None and self._whole.finish_reason is FinishReason.ABORTED
        return self._failure is None and not aborted

    @property
    def is_lost(self) -> bool:
        """Nobody has heard it to its end, and nobody listens."""
        return not self._told and not self._listeners

    def tell(self, *parts: Heard) -> None:
        """More of it."""
        if parts:
            self._parts += parts
            self._wake()

    def end(self, failure: Exception | None = None) -> None:
        """All was told, or it has failed."""
        self._failure, self._ended, self.task = failure, True, None
        if failure is None:
            last = self._parts[-1]
            assert isinstance(last, TurnEnded), "an answer that did not fail has its end"
            self._whole = last
        self._shrink()
        self._wake()

    async def listen(self) -> AsyncIterator[Heard]:
        """From its beginning to its end. It counts as heard once the iterator is asked for more after the end.

        Raises:
            Exception: the failure that it ended with.
        """
        position = 0
        parts = self._parts if self._parts or self._whole is None else _parts_of(self._whole)
        self._listeners += 1
        try:
            while True:
                while position < len(parts):
                    yield parts[position]
                    position += 1
                if self._ended and position == len(parts):
                    break
                self._news = self._news or asyncio.Event()
                await self._news.wait()
            self._told = True
        finally:
            self._listeners -= 1
            self._shrink()
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def _shrink(self) -> None:
        """An answer that waits for nobody is kept as its message, which the tree keeps as well."""
        if self._ended and not self._listeners:
            self._parts = []


@final
class Answers:
    """Of one session. Failed ones are forgotten: a call that is sent again after a failure is sampled."""

    def __init__(self) -> None:
        self._by_call: dict[bytes, list[Answer]] = {}
        self._by_retry: dict[str, Answer] = {}
        self._running: list[Answer] = []

    def find(self, call: TurnCall, key: bytes) -> Answer | None:
        """The answer to this very call, sent before. None: it is new.

        Raises:
            CallRefusedError: another call was sent with its retry key.
        """
        if call.retry:
            known = self._by_retry.get(call.retry)
            if known is not None and known.key != key:
                raise CallRefusedError(
                    Refusal.CONFLICT,
                    "another call was sent with this idempotency key; send each call with a key of its own",
                )
            return known if known is not None and known.is_good else None
        equal = [answer for answer in self._by_call.get(key, ()) if answer.is_good]
        lost = [answer for answer in equal if answer.is_lost]
        if lost:
            return lost[0]
        return equal[-1] if equal and call.resent else None

    def add(self, answer: Answer, retry: str) -> None:
        """A new one. `retry`: the retry key of its call, or empty."""
        self._by_call.setdefault(answer.key, []).append(answer)
        self._running.append(answer)
        if retry:
            self._by_retry[retry] = answer

    def forget(self, answer: Answer) -> None:
        """It has failed."""
        self._by_call[answer.key].remove(answer)
        self._by_retry = {retry: each for retry, each in self._by_retry.items() if each is not answer}

    @property
    def running(self) -> tuple[Answer, ...]:
        """Those that are still sampled."""
        self._running = [answer for answer in self._running if not answer.ended]
        return tuple(self._running)


def _parts_of(ended: TurnEnded) -> list[Heard]:
    return [TurnBegan(prompt_tokens=ended.prompt_tokens), *deltas_of(ended.message), ended]


def deltas_of(message: Message) -> Iterator[Delta]:
    """An answer that is there already, as it would be heard."""
    if message.reasoning:
        yield ReasoningDelta(message.reasoning)
    if message.content:
        yield TextDelta(message.content)
    for index, call in enumerate(message.tool_calls):
        yield ToolCallBegun(index, call.id, call.name)
        if call.arguments:
            yield ToolArgumentsDelta(index, call.arguments)
