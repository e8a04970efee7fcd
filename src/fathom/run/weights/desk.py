"""Carries out what an operator asks of the fleet while the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import final

from fathom.core.errors import ConfigError, FathomError
from fathom.core.ids import EngineId
from fathom.run.weights.fleet import Fleet
from fathom.run.weights.requests import Answer, JoinRequest, LeaveRequest, Request, RequestBox, Unreadable

_LOOK_S = 0.5


@final
class Desk:
    """Takes requests out of the run's folder. Each is a task of its own: a long drain delays no other."""

    def __init__(self, fleet: Fleet, run: Path) -> None:
        self._fleet = fleet
        self._box = RequestBox.of(run)
        self._box.open()

    async def serve(self) -> None:
        """Look for requests, for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name, request in self._box.take():
                    tasks.create_task(self._answer(name, request))
                await asyncio.sleep(_LOOK_S)

    async def _answer(self, name: str, request: Request | Unreadable) -> None:
        answer = Answer(done=False, text="the run ended meanwhile")
        try:
            answer = Answer(done=True, text=await self._carry_out(request))
        except FathomError as error:
            answer = Answer(done=False, text=str(error))
        finally:
            self._box.reply(name, answer)

    async def _carry_out(self, request: Request | Unreadable) -> str:
        match request:
            case JoinRequest():
                return f"{await self._fleet.join()} joined"
            case LeaveRequest():
                discarded = await self._fleet.leave(EngineId(request.engine), request.within_s)
                return f"{request.engine} left; {discarded} generations were discarded"
            case Unreadable():
                raise ConfigError(f"this is no request: {request.why}")
