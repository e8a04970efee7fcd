"""The engines of a run: started, watched, replaced when they die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import final

from fathom.config.rollout import SyncConfig
from fathom.core.errors import EngineError, NoProgressError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine, ScoreRequest, ScoreResult
from fathom.run.history.recorder import Recorder
from fathom.sync.publisher import Publisher
from fathom.sync.transports.transport import Transport

_LOOK_S = 1.0
_MAX_REPLACEMENTS = 5
"""An engine that died this often in one incarnation is not started again."""

Launch = Callable[[EngineId], Awaitable[Engine]]


@final
class Fleet:
    """Engines by name. A dead one is fenced at once, replaced by a new process, and serves after a verified reload."""

    def __init__(
        self, names: list[EngineId], launch: Launch, transport: Transport, sync: SyncConfig, recorder: Recorder
    ) -> None:
        self._names = names
        self._launch = launch
        self._transport = transport
        self._sync = sync
        self._recorder = recorder
        self._engines: dict[EngineId, Engine] = {}
        self._replacements = 0
        self._recovering = asyncio.Lock()
        self._publisher: Publisher | None = None

    async def start(self) -> None:
        """Launch all engines. Raises ConfigError or EngineError when one cannot start."""
        for name in self._names:
            self._engines[name] = await self._launch(name)
        self._publisher = Publisher(list(self._engines.values()), self._transport, self._sync)

    @property
    def publisher(self) -> Publisher:
        """Delivers versions to these engines."""
        if self._publisher is None:
            raise AssertionError("start the fleet first")
        return self._publisher

    @property
    def serving(self) -> list[Engine]:
        """Engines that may get requests now."""
        return [self._engines[name] for name in self.publisher.serving]

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score by any engine that serves. Raises EngineError when none does."""
        engines = self.serving
        if not engines:
            raise EngineError("fleet", "no engine serves")
        return await engines[0].score(request)

    async def look(self) -> bool:
        """Wait a moment, then see whether every engine answers; returns True when some had to be replaced.

        Raises:
            NoProgressError: an engine dies again and again.
        """
        await asyncio.sleep(_LOOK_S)
        for name in self.publisher.serving:
            try:
                await self._engines[name].health()
            except EngineError as error:
                self.publisher.fence(name, error.reason)
        if not self.publisher.fenced:
            return False
        await self.recover()
        return True

    async def recover(self) -> None:
        """Replace every fenced engine and reload it. Raises NoProgressError when that was needed too often."""
        async with self._recovering:
            for name, reason in self.publisher.fenced.items():
                self._recorder.fault(name, EngineError(name, reason))
                self._replacements += 1
                if self._replacements > _MAX_REPLACEMENTS * len(self._names):
                    raise NoProgressError(
                        f"{self._replacements - 1} engines had to be replaced, the last for: {reason}; see their logs "
                        "in the run's folder"
                    )
                await self._engines[name].close()
                try:
                    self._engines[name] = await self._launch(name)
                    await self.publisher.restore(self._engines[name])
                except EngineError as error:
                    self._recorder.fault(name, error)
            self._recorder.commit()

    async def close(self) -> None:
        """End all engines and remove what was published. Idempotent."""
        if self._publisher is None:
            self._transport.close()
        else:
            await self._publisher.close()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
