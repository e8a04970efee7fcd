"""One engine of the fleet, looked after on its own from its start to its end.

    serves --a look fails, or another accuses it--> fenced --new process, full verified reload--> serves

Each member is watched by a task of its own, so a slow or silent one delays nobody's watch but its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import final

from fathom.core.errors import ConfigError, EngineError, EngineTimeoutError, NoProgressError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine
from fathom.ledger.events import EngineRestored
from fathom.run.history.recorder import Recorder
from fathom.sync.publisher import Publisher

MAX_REPLACEMENTS = 5
"""An engine that had to be replaced this often in one incarnation is given up."""

Launch = Callable[[EngineId], Awaitable[Engine]]
"""Starts an engine of a name; raises ConfigError or EngineError when it cannot."""


@final
class Member:
    """Owns its engine and, after a failure, the one that takes its place under the same name."""

    def __init__(
        self,
        engine: Engine,
        launch: Launch,
        publisher: Publisher,
        recorder: Recorder,
        *,
        look_s: float,
        health_s: float,
    ) -> None:
        """Looks at the engine every `look_s` seconds; it must answer within `health_s`."""
        self.name = engine.id
        self.engine = engine
        self.leaving = False
        self._launch = launch
        self._publisher = publisher
        self._recorder = recorder
        self._look_s = look_s
        self._health_s = health_s
        self._alarm = asyncio.Event()
        self._replacements = 0

    def raise_alarm(self) -> None:
        """It was fenced or leaves: do not wait for the next look."""
        self._alarm.set()

    async def serve(self) -> None:
        """Watch it. Returns when it is fenced, by this watch or by others, or is to leave."""
        while self.name not in self._publisher.fenced and not self.leaving:
            try:
                await self._look()
            except EngineError as error:
                self._publisher.fence(self.name, error.reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._alarm.wait()
            self._alarm.clear()

    async def replace(self) -> None:
        """End the fenced engine, start another in its place, and let it serve after a full verified reload.

        Raises:
            NoProgressError: it had to be replaced too often.
        """
        fenced_at, tries = time.monotonic(), 0
        while True:
            tries += 1
            self._replacements += 1
            if self._replacements > MAX_REPLACEMENTS:
                reason = self._publisher.fenced.get(self.name, "unknown")
                raise NoProgressError(
                    f"{self.name} had to be replaced more than {MAX_REPLACEMENTS} times, the last for: {reason}; see "
                    "its log in the run's folder"
                )
            await self.close()
            try:
                self.engine = await self._launch(self.name)
                await self.restore()
                break
            except (EngineError, ConfigError) as error:
                self._recorder.fault(self.name, error)
                await asyncio.sleep(self._look_s)
        seconds = time.monotonic() - fenced_at
        restored = EngineRestored(engine=self.name, version=self._publisher.delivered, seconds=seconds, tries=tries)
        self._recorder.record(restored)
        self._recorder.commit()

    async def restore(self) -> None:
        """Load it in full, verified. Gives up at once when it stops answering meanwhile.

        Raises:
            EngineError: it cannot be loaded, or fell silent.
        """
        restoring = asyncio.ensure_future(self._publisher.restore(self.engine))
        try:
            while not (await asyncio.wait({restoring}, timeout=self._look_s))[0]:
                await self._look()
            await restoring
        finally:
            restoring.cancel()
            await asyncio.gather(restoring, return_exceptions=True)

    async def close(self) -> None:
        """End its engine. Idempotent."""
        await self.engine.close()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self._health_s):
                await self.engine.health()
        except TimeoutError:
            reason = f"it did not answer a look within {self._health_s:g} s (engine.health_timeout_s)"
            raise EngineTimeoutError(self.name, reason) from None
