"""A clock that runs only as far as the next deadline, and only when nothing else is to be done.

Faults that hang end at deadlines. With real time a test either waits for them or sets them so short that a busy machine
misses them without any fault. Under this clock a deadline of a minute costs nothing and is never missed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack, final

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_PATIENCE_S = 20.0


def run_scripted(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, under a `ScriptedLoop`."""
    with asyncio.Runner(loop_factory=ScriptedLoop) as runner:
        return runner.run(main)


@final
class ScriptedLoop(asyncio.SelectorEventLoop):
    """Its time stands still while a callback is ready or a thread works for it; else it leaps to the next timer.

    For what happens within one process: a timer that guards another process is up at once. Should a thread work for
    more than 20 real seconds, it may be waiting for a timer, and the time leaps too.
    """

    def __init__(self) -> None:
        """Begin at 0 s."""
        self._now_s = 0.0
        self._threads = 0
        super().__init__(_Leaping(self._leap, lambda: self._threads > 0))

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        """See `asyncio.loop.run_in_executor`; until it ends the time stands still."""
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, future: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def _leap(self, seconds: float) -> None:
        self._now_s += seconds


@final
class _Leaping(selectors.BaseSelector):
    """Waits for files as the selector of the system does, but not for the time to pass."""

    def __init__(self, leap: Callable[[float], None], busy: Callable[[], bool]) -> None:
        self._inner = selectors.DefaultSelector()
        self._leap = leap
        self._busy = busy

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return self._inner.select(timeout)
        found = self._inner.select(_PATIENCE_S if self._busy() else 0)
        if not found:
            self._leap(timeout)
        return found

    def close(self) -> None:
        self._inner.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()
