"""The pages of running sequences.

Letters: S slots, P pages of the longest sequence, B sequences of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from fathom.rollout.engines.embedded.server.kv.page_pool import PageLeakError, PagePool
from fathom.rollout.engines.embedded.server.kv.prefix_tree import Hit, PrefixTree, Root


@final
class KvMemory:
    """A table of pages per slot, filled from the cache of prefixes or with pages of the slot's own."""

    def __init__(
        self, *, slots: int, max_tokens: int, pages: int, page_tokens: int, copy_page: Callable[[int, int], None]
    ) -> None:
        """`copy_page(from, to)` gives a page the content of another.

        Raises:
            ValueError: one sequence of `max_tokens` would not fit.
        """
        self.page_tokens = page_tokens
        width = self.pages_for(max_tokens)
        if pages < width:
            raise ValueError(f"{pages} pages of {page_tokens} tokens do not hold one sequence of {max_tokens} tokens")
        self._pool = PagePool(pages)
        self._tree = PrefixTree(self._pool, page_tokens)
        self._tables = np.zeros((slots, width), np.int64)
        self.held = np.zeros(slots, np.int64)
        """int64 [S]: pages of each slot."""
        self._copy_page = copy_page

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens needs."""
        return -(-tokens // self.page_tokens)

    @property
    def available(self) -> int:
        """Pages that no sequence needs."""
        return self._pool.available

    def tables(self, slots: np.ndarray) -> np.ndarray:
        """int64 [B, P]: the pages of these slots in order; what lies past the last one means nothing."""
        return self._tables[slots, : max(1, int(self.held[slots].max()))]

    def places(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] pages and offsets of tokens of these slots, which must have pages for them."""
        return self._tables[slots, positions // self.page_tokens], positions % self.page_tokens

    def find(self, root: Root, tokens: np.ndarray) -> Hit:
        """What is cached of the beginning of int32 `tokens`."""
        return self._tree.find(root, tokens)

    def begin(self, slot: int, tokens: int, hit: Hit, spare: int) -> int | None:
        """Give an empty slot pages for `tokens` tokens: those that were just found, and its own for the rest.

        Returns the number of its first tokens whose KV is there already. None: fewer than `spare` pages would be left,
        and nothing has changed.
        """
        shared, tail = hit.pages, [hit.tail_of.page] if hit.tail_of else []
        needed = self.pages_for(tokens) - len(shared)
        self._pool.share(shared)
        if self.available - needed < spare:
            self._pool.drop(shared)
            return None
        self._tree.touch(hit)
        self._pool.share(tail)  # it must not be evicted before it is copied,
        if self.available < needed:
            self._pool.drop(tail)  # unless its place is needed
            tail = []
        own = self._take(needed)
        for page in tail:
            self._copy_page(page, own[0])
        self._pool.drop(tail)
        self._tables[slot, : len(shared) + needed] = shared + own
        self.held[slot] = len(shared) + needed
        return len(shared) * self.page_tokens + (hit.tail if tail else 0)

    def grow(self, slot: int) -> bool:
        """One more page. False: every page is needed by a sequence."""
        if not self.available:
            return False
        self._tables[slot, self.held[slot]] = self._take(1)[0]
        self.held[slot] += 1
        return True

    def remember(self, slot: int, root: Root, tokens: np.ndarray) -> None:
        """Cache the KV of the slot's first tokens, int32 `tokens`; the sequence may go on after them."""
        count = self.pages_for(len(tokens))
        mine = self._tables[slot, :count].tolist()
        chosen = self._tree.insert(root, tokens, mine)
        if chosen != mine:  # another sequence computed the same: one copy is enough
            self._pool.share(page for page, old in zip(chosen, mine, strict=True) if page != old)
            self._pool.drop(old for page, old in zip(chosen, mine, strict=True) if page != old)
            self._tables[slot, :count] = chosen

    def release(self, slot: int) -> None:
        """The slot needs no pages any more."""
        self._pool.drop(self._tables[slot, : self.held[slot]].tolist())
        self.held[slot] = 0

    def clear(self) -> None:
        """Nothing computed so far may be found again."""
        self._tree.clear()

    def check(self) -> None:
        """Every page is accounted for. Raises `PageLeakError`."""
        held = [page for slot, count in enumerate(self.held) for page in self._tables[slot, :count].tolist()]
        self._pool.check(held, self._tree.pages())

    def _take(self, count: int) -> list[int]:
        self._tree.evict(count - self._pool.free)
        if self._pool.free < count:
            raise PageLeakError(f"{self.available} pages are available, but only {self._pool.free} could be freed")
        return self._pool.take(count)
