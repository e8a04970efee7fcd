"""Who hears what the publisher learns about engines, at the moment it does."""

from __future__ import annotations

from typing import Protocol, final

from fathom.core.ids import EngineId, PolicyVersion


class Listener(Protocol):
    """Told in the event loop; must not wait."""

    def doubts(self, engine: EngineId) -> None:
        """It is about to serve what only a probe can prove: nothing it generates may be used until it `serves`."""
        ...

    def serves(self, engine: EngineId, version: PolicyVersion) -> None:
        """The engine was proven to hold a version and has confirmed that it serves it."""
        ...

    def fenced(self, engine: EngineId, reason: str) -> None:
        """The engine gets no requests from here on; what it has not finished must be discarded."""
        ...


@final
class Deaf:
    """Nobody listens: for publications to those that get no requests."""

    def doubts(self, engine: EngineId) -> None:
        """Not heard."""

    def serves(self, engine: EngineId, version: PolicyVersion) -> None:
        """Not heard."""

    def fenced(self, engine: EngineId, reason: str) -> None:
        """Not heard."""
