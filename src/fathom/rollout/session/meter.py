"""What all sessions did: turns, tokens, and how many turns ran at once over time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from fathom.rollout.session.call import TurnEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """A look at a meter. Differences of two looks are what happened between them."""

    turns: int
    """Turns that ended with an answer."""
    failed: int
    """Turns that ended without one."""
    prompt_tokens: int
    """Tokens of the contexts of those answered."""
    cached_tokens: int
    """Of those, tokens whose keys and values were there already. Hit rate: this divided by `prompt_tokens`."""
    sampled_tokens: int
    """Tokens sampled for them."""
    running: int
    """Turns that run now."""
    most_running: int
    """The most that ran at once."""
    running_s: float
    """Seconds of all turns, those that run included. Mean concurrency: its growth divided by the time that passed."""


@final
class Meter:
    """Counts. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._turns = self._failed = self._prompt = self._cached = self._sampled = 0
        self._running = self._most = 0
        self._running_s = 0.0
        self._counted_s = clock()

    def begin(self) -> None:
        """A turn begins."""
        self._count()
        self._running += 1
        self._most = max(self._most, self._running)

    def end(self, ended: TurnEnded | None) -> None:
        """A turn that began has ended. None: without an answer."""
        self._count()
        self._running -= 1
        if ended is None:
            self._failed += 1
            return
        self._turns += 1
        self._prompt += ended.prompt_tokens
        self._cached += ended.cached_tokens
        self._sampled += ended.sampled_tokens

    def read(self) -> Metered:
        """What was counted until now."""
        self._count()
        return Metered(
            turns=self._turns,
            failed=self._failed,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            sampled_tokens=self._sampled,
            running=self._running,
            most_running=self._most,
            running_s=self._running_s,
        )

    def _count(self) -> None:
        now_s = self._clock()
        self._running_s += self._running * (now_s - self._counted_s)
        self._counted_s = now_s
