"""Engine processes that several adapters share: the base is in memory once, and each adapter sees an engine of its own.

    adapter a -- engine-0 of a --+
                                 +-- process of engine-0: base, adapter a, adapter b
    adapter b -- engine-0 of b --+

Each adapter has its own weights, KV memory and requests there; what happens to one does not touch the other, but for
the process itself. Who gives up an engine and asks for another in its place has lost faith in the process: it is ended,
and the others find their engines dead and ask for theirs in turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from fathom.core.adapter import AdapterForm
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine
from fathom.rollout.engines.embedded.client import EmbeddedEngine, Leave
from fathom.rollout.engines.embedded.process import EmbeddedSpec, EngineProcess


@dataclass(slots=True, kw_only=True)
class _Shared:
    """A process, and whose engines are in it."""

    process: EngineProcess
    given: set[str] = field(default_factory=set[str])
    """Adapters that were ever given an engine in it."""
    users: int = 0
    """Engines in it that are not closed."""

    @property
    def lives(self) -> bool:
        """Others may still be let in."""
        return self.process.alive and self.users > 0

    def enter(self, adapter: str) -> Leave:
        """One more engine is in it; what is returned takes it out again, and the last one ends the process."""
        self.given.add(adapter)
        self.users += 1
        inside = True

        async def leave() -> None:
            nonlocal inside
            self.users -= inside
            inside = False
            if self.users == 0:
                await self.process.close()

        return leave


@final
class SharedProcesses:
    """Starts a process where the first adapter asks for an engine, and lets the others in."""

    def __init__(self, forms: Sequence[AdapterForm], logs: Path, max_context_tokens: int) -> None:
        """
        Args:
            forms: of all adapters, each of another name.
            logs: folder of the processes' logs.
            max_context_tokens: longest sequence of any adapter.
        """
        self._forms = tuple(forms)
        self._logs = logs
        self._max_context_tokens = max_context_tokens
        self._shared: dict[EngineId, _Shared] = {}
        self._turns: defaultdict[EngineId, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def launch(self, spec: EmbeddedSpec) -> Engine:
        """The engine of the adapter and the name in `spec`. See `EngineProcess.launch` for what it raises."""
        adapter = spec.adapter
        assert adapter is not None, "what shares a process computes with an adapter"
        async with self._turns[spec.engine]:
            shared = self._shared.get(spec.engine)
            if shared is not None and (adapter.name in shared.given or not shared.lives):
                del self._shared[spec.engine]
                await shared.process.close()
                shared = None
            if shared is None:
                shared = self._shared[spec.engine] = _Shared(process=await EngineProcess.launch(self._whole(spec)))
            return EmbeddedEngine.share(shared.process, spec, shared.enter(adapter.name))

    def _whole(self, spec: EmbeddedSpec) -> EmbeddedSpec:
        first, *others = self._forms
        log_path = self._logs / f"{spec.engine}.log"
        longest = self._max_context_tokens
        return replace(spec, adapter=first, beside=tuple(others), log_path=log_path, max_context_tokens=longest)
