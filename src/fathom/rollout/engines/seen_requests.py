"""Requests that were sent before: a generation is never started twice."""

from __future__ import annotations

from typing import final

KEPT = 1 << 17
"""Ids that are remembered. A request is sent again within moments, if at all; runs have millions."""


@final
class SeenRequests:
    """The ids of the newest requests."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """It was sent now."""
        self._ids[request_id] = None
        if len(self._ids) > KEPT:
            del self._ids[next(iter(self._ids))]

    def discard(self, request_id: str) -> None:
        """It was refused after all, and may be sent again."""
        self._ids.pop(request_id, None)
