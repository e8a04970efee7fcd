"""Faults on demand, at named places."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from fathom.core.errors import TransferInterruptedError


class FaultKind(StrEnum):
    """What happens."""

    RAISE = "raise"
    """A plain error, as code that is not ours raises it."""
    HANG = "hang"
    """Never returns; only a deadline or a cancellation ends it."""
    DELAY = "delay"
    """Returns after `seconds`."""
    STUCK = "stuck"
    """Never returns, and does not react to the first cancellation either."""
    CANCELLED = "cancelled"
    """Ends as if it had been cancelled, by nobody."""
    INTERRUPTED = "interrupted"
    """Says that a transfer broke elsewhere."""


class InjectedError(Exception):
    """Raised on purpose by `ScriptedFaults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong once."""

    place: str
    """Where, e.g. `commit.after.engine-0`."""
    kind: FaultKind
    """What happens."""
    seconds: float = 0.0
    """How long, for a delay."""
    visit: int = 0
    """At which visit of the place, from 0."""


@final
class ScriptedFaults:
    """Plays a script; everywhere else nothing happens.

    >>> faults = ScriptedFaults(Fault(place="stage.before.a", kind=FaultKind.RAISE))
    """

    def __init__(self, *script: Fault) -> None:
        self._script = {(fault.place, fault.visit): fault for fault in script}
        self._reached: list[str] = []

    @property
    def reached(self) -> tuple[str, ...]:
        """Every place visited, in order."""
        return tuple(self._reached)

    async def reach(self, place: str) -> None:
        """Return, wait, or raise, as the script says."""
        fault = self._script.get((place, self._reached.count(place)))
        self._reached.append(place)
        if fault is None:
            return
        match fault.kind:
            case FaultKind.RAISE:
                raise InjectedError(f"injected at {place}")
            case FaultKind.HANG:
                await asyncio.Event().wait()
            case FaultKind.DELAY:
                await asyncio.sleep(fault.seconds)
            case FaultKind.STUCK:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                await asyncio.Event().wait()
            case FaultKind.CANCELLED:
                raise asyncio.CancelledError
            case FaultKind.INTERRUPTED:
                raise TransferInterruptedError(place, "injected")
