"""How a run is asked to end: once politely, twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import final

from fathom.core.errors import FathomError, RunStoppedError

_TURNS_OF_THE_LOOP_S = 0.01
"""A timer is due after all signals that were there before it; a mere turn of the loop is not."""
_SAME_SIGNAL_S = 0.1
"""A process that got the same signal may be heard of before the signal is."""
_INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}


@final
class Stop:
    """A request to end. The first signal sets it; the second ends the process, and with it all of its children."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._signal: signal.Signals | None = None
        self._listeners: list[Callable[[], object]] = []

    @property
    def asked(self) -> bool:
        """True once the run was asked to end. Safe to read from any thread."""
        return self._asked.is_set()

    @property
    def exit_code(self) -> int:
        """What the process should exit with: 0 unless a signal asked."""
        return _INTERRUPTED[self._signal] if self._signal else 0

    def on_ask(self, listener: Callable[[], object]) -> None:
        """Call `listener` (in the event loop's thread) when the run is asked to end."""
        self._listeners.append(listener)

    def ask(self) -> None:
        """Ask the run to end, from the event loop's thread."""
        self._asked.set()
        for listener in self._listeners:
            listener()

    @asynccontextmanager
    async def cancels(self) -> AsyncGenerator[None]:
        """Within it a request to end cancels what the current task waits for; only for what leaves no state to save.

        Raises:
            RunStoppedError: it did; or something failed after the request, as processes that got the same signal do.
        """
        task = asyncio.current_task()
        assert task is not None, "used within the event loop"
        self._listeners.append(task.cancel)
        try:
            if self.asked:
                raise asyncio.CancelledError
            try:
                yield
            except FathomError:
                await asyncio.sleep(_SAME_SIGNAL_S)
                raise
        except (asyncio.CancelledError, FathomError):
            if not self.asked:
                raise
            task.uncancel()
            raise RunStoppedError("the run was asked to end; start or resume it again") from None
        finally:
            self._listeners.remove(task.cancel)

    async def heard(self) -> None:
        """Let a signal be heard that came while the event loop stood still, as it does while torch loads.

        Raises:
            RunStoppedError: the run was asked to end.
        """
        async with self.cancels():
            await asyncio.sleep(_TURNS_OF_THE_LOOP_S)

    def listen(self) -> None:
        """Take SIGINT and SIGTERM from now on; outside the main thread they are left alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in _INTERRUPTED:
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self._signal is not None:
            os._exit(_INTERRUPTED[number])  # children notice: the engine by its closed stdin, graders by the kernel
        self._signal = number
        self.ask()
