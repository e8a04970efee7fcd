"""Which slot holds the computed prompt of a group, so that its other members need not compute it again."""

from __future__ import annotations

from typing import final

from fathom.core.ports.engine import GenerateRequest

PrefixKey = tuple[int, str, bytes]
"""Version number, barrier name, prompt ids: equal keys have equal KV.

The barrier is part of it because KV copied and KV computed may differ in the last bit, and what was there before a
barrier must not show in its results.
"""


def prefix_key(version: int, request: GenerateRequest) -> PrefixKey:
    """The key of a request's prompt under a version."""
    return version, request.barrier.name if request.barrier else "", request.prompt_ids.tobytes()


@final
class Prefixes:
    """An entry lives until its slot is given away or a version is committed."""

    def __init__(self) -> None:
        self._slots: dict[PrefixKey, int] = {}
        self._keys: dict[int, PrefixKey] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._keys

    def find(self, key: PrefixKey) -> int | None:
        """The slot that holds this prompt. None: none does."""
        return self._slots.get(key)

    def remember(self, key: PrefixKey, slot: int) -> None:
        """`slot` holds this prompt now."""
        self.forget(slot)
        if key not in self._slots:
            self._slots[key] = slot
            self._keys[slot] = key

    def forget(self, slot: int) -> None:
        """The slot is given to another sequence, or computed again."""
        if (key := self._keys.pop(slot, None)) is not None:
            del self._slots[key]

    def clear(self) -> None:
        """Nothing computed so far may be read by a new request."""
        self._slots.clear()
        self._keys.clear()
