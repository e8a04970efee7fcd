"""One step of the protocol on several engines at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar, final

from fathom.core.errors import EngineRefusedError, PayloadError, TransferInterruptedError
from fathom.core.ids import EngineId
from fathom.core.ports.faults import Faults
from fathom.sync.receiver import Receiver

T = TypeVar("T")

_left: set[asyncio.Task[Any]] = set()
"""Calls that nobody waits for and that have not ended: the event loop itself would forget them."""


@final
class Phase(Generic[T]):
    """Calls engines concurrently, each under the same deadline, and sorts what comes back.

    After `run`, each engine called is in exactly one of `answers`, `refused`, `failed` and `interrupted`. When `run`
    is cancelled, those that had not answered by then are in none of them. It may run again for those interrupted.
    """

    def __init__(self, name: str, timeout_s: float, faults: Faults) -> None:
        """`faults` reaches `<name>.before.<engine>`, and `<name>.after.<engine>` when the answer is in."""
        self._name = name
        self._timeout_s = timeout_s
        self._faults = faults
        self.answers: dict[EngineId, T] = {}
        """What the engines that did it said."""
        self.refused: dict[EngineId, str] = {}
        """Why an engine says the version is wrong. The engine itself is well."""
        self.failed: dict[EngineId, str] = {}
        """Why an engine is not to be trusted: it raised, or did not answer in time."""
        self.interrupted: dict[EngineId, str] = {}
        """Why an engine that is well did not get what another one broke."""
        self.slowest_s = 0.0
        """Seconds the slowest of the engines that answered took."""

    async def run(self, engines: Iterable[Receiver], call: Callable[[Receiver], Awaitable[T]]) -> None:
        """Return when every engine answered, refused or failed: at the latest after the deadline.

        An engine that does not even react to being cancelled then is left to itself; its late answer counts no more.
        """
        self.interrupted = {}
        await asyncio.gather(*(self._attempt(engine, call) for engine in engines))

    @property
    def unanswered(self) -> dict[EngineId, str]:
        """Why engines did not answer, whatever the kind."""
        return self.refused | self.failed | self.interrupted

    def reason(self, engine: EngineId) -> str:
        """Why this engine did not answer."""
        return self.unanswered.get(engine) or f"its {self._name} was interrupted"

    async def _attempt(self, engine: Receiver, call: Callable[[Receiver], Awaitable[T]]) -> None:
        started = time.perf_counter()
        work = asyncio.create_task(self._work(engine, call))
        work.add_done_callback(_heard)
        try:
            await asyncio.wait({work}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work}, timeout=self._timeout_s)
            if work.done() and not work.cancelled():
                self._sort(engine.id, work, time.perf_counter() - started)
            raise
        if work.done():
            self._sort(engine.id, work, time.perf_counter() - started)
        else:
            work.cancel()
            _left.add(work)
            self.failed[engine.id] = f"{self._name} did not end within {self._timeout_s:g} s"

    def _sort(self, engine: EngineId, work: asyncio.Task[T], seconds: float) -> None:
        try:
            answer = work.result()
        except (PayloadError, EngineRefusedError) as error:
            self.refused[engine] = f"{self._name}: {error}"
        except TransferInterruptedError as error:
            self.interrupted[engine] = f"{self._name}: {error}"
        except asyncio.CancelledError:  # nobody here did: the engine's own call ended with it
            self.failed[engine] = f"{self._name} failed: it was cancelled inside"
        except Exception as error:  # noqa: BLE001 - the boundary: whatever an engine raises, it is the engine that failed
            self.failed[engine] = f"{self._name} failed: {type(error).__name__}: {error}"
        else:
            self.answers[engine] = answer
            self.slowest_s = max(self.slowest_s, seconds)

    async def _work(self, engine: Receiver, call: Callable[[Receiver], Awaitable[T]]) -> T:
        await self._faults.reach(f"{self._name}.before.{engine.id}")
        answer = await call(engine)
        await self._faults.reach(f"{self._name}.after.{engine.id}")
        return answer


def asked_to_stop() -> bool:
    """Whether the task that calls this is cancelled: an error of that kind may also come out of what it called."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _heard(late: asyncio.Task[T]) -> None:
    """Look at what a call ended with, so that nothing complains that nobody did when it ended too late."""
    _left.discard(late)
    if not late.cancelled():
        late.exception()
