"""All sessions of a process, by key. Who knows a key may use that session, and no other."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import final

from fathom.core.errors import BudgetError, RecordError
from fathom.rollout.session.call import CallRefusedError, Reads, Refusal, Renderer
from fathom.rollout.session.meter import Meter
from fathom.rollout.session.plan import Closed, SessionPlan
from fathom.rollout.session.session import Generate, Session

_KEY_BYTES = 24
_KEY = re.compile(r"fathom-([0-9]{1,9})-[\w-]+", re.ASCII)
"""With the incarnation of the run that gave it."""
_ENDED_KEPT = 10_000
"""Keys of closed sessions that are told from unknown ones."""


@final
class Sessions:
    """Opens, finds and closes them. Used in one event loop."""

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        reads: Reads,
        *,
        max_tokens: int,
        idle_s: float,
        incarnation: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is open yet.

        Args:
            generate: asks an engine.
            renderer: messages to ids.
            reads: ids to answers.
            max_tokens: tokens kept in all sessions together, beyond which none is opened. Those that are open may grow
                to what their plans allow.
            idle_s: seconds without a turn after which `expire` closes a session.
            incarnation: of the run that they belong to. Keys of earlier ones are told from unknown ones.
            clock: gives seconds.
        """
        self.meter = Meter(clock)
        self._generate = generate
        self._renderer = renderer
        self._reads = reads
        self._max_tokens = max_tokens
        self._idle_s = idle_s
        self._incarnation = incarnation
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tokens(self) -> int:
        """Tokens that they keep, each once."""
        return sum(session.tokens for session in self._open.values())

    def open(self, plan: SessionPlan) -> str:
        """A new session; returns its key, which cannot be guessed.

        Raises:
            BudgetError: the open ones keep as many tokens as is allowed.
            ValueError: one of this name is open: two would send requests of one identity.
        """
        if self.tokens >= self._max_tokens:
            raise BudgetError(
                f"{len(self)} sessions keep {self.tokens} tokens, and {self._max_tokens} are allowed; close some, run "
                "fewer trajectories at once, or allow more"
            )
        if any(session.plan.name == plan.name for session in self._open.values()):
            raise ValueError(f"a session named {plan.name} is open; close it before its name is used again")
        key = f"fathom-{self._incarnation}-{secrets.token_urlsafe(_KEY_BYTES)}"
        self._open[key] = Session(plan, self._generate, self._renderer, self._reads, self.meter, self._clock)
        return key

    def get(self, key: str) -> Session:
        """The session of a key.

        Raises:
            CallRefusedError: it was closed, ended with an earlier incarnation, or there never was one.
        """
        session = self._open.get(key)
        if session is not None:
            return session
        if key in self._ended:
            raise CallRefusedError(Refusal.ENDED, "the session of this API key has ended; nothing is sampled for it")
        given_by = _KEY.fullmatch(key)
        if given_by is not None and int(given_by[1]) < self._incarnation:
            raise CallRefusedError(
                Refusal.ENDED,
                f"the session of this API key belongs to incarnation {int(given_by[1])} of the run, which has ended "
                f"(this is {self._incarnation}): its task is run again under another key; end this episode",
            )
        raise CallRefusedError(
            Refusal.UNKNOWN_KEY, "this API key names no session; use the key that the episode was given as its API key"
        )

    async def close(self, key: str, given_up: str = "") -> Closed:
        """End a session and take what it leaves. See `Session.close`. Its key is refused from now on.

        Raises:
            CallRefusedError: as `get`.
            RecordError: as `Session.close`.
        """
        session = self.get(key)
        try:
            return await session.close(given_up)
        finally:
            self._open.pop(key, None)
            self._ended[key] = None
            if len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    async def expire(self) -> None:
        """Abort sessions that were idle for too long. Their records stay until they are closed."""
        for session in list(self._open.values()):
            if session.idle_s >= self._idle_s:
                try:
                    await session.close(f"nothing was asked for {self._idle_s:g} s")
                except RecordError:
                    continue  # told to whoever closes it
