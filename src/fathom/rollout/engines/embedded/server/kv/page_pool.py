"""Pages of KV memory, and who needs each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np


class PageLeakError(AssertionError):
    """The books of the pages contradict each other. Nothing that is generated afterwards can be trusted."""


@final
class PagePool:
    """A page is free, cached, in use, or both of the last two. `n` pages, numbered from 0."""

    def __init__(self, pages: int) -> None:
        self._users = np.zeros(pages, np.int32)
        self._cached = np.zeros(pages, np.bool_)
        self._free = list(range(pages - 1, -1, -1))
        self._in_use = 0

    @property
    def size(self) -> int:
        """All pages."""
        return len(self._users)

    @property
    def free(self) -> int:
        """Pages that nobody needs."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that no sequence needs: free ones, and cached ones that may be forgotten."""
        return self.size - self._in_use

    def take(self, count: int) -> list[int]:
        """Free pages, each with one user from now on. There must be that many."""
        if count > len(self._free):
            raise PageLeakError(f"{count} pages were taken while {len(self._free)} were free")
        taken = [self._free.pop() for _ in range(count)]
        self._users[taken] = 1
        self._in_use += count
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each of these cached pages."""
        for page in pages:
            self._in_use += not self._users[page]
            self._users[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One user fewer for each of these pages."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._in_use -= 1
                if not self._cached[page]:
                    self._free.append(page)

    def used(self, page: int) -> bool:
        """True while a sequence needs it."""
        return bool(self._users[page])

    def keep(self, page: int) -> None:
        """The cache holds this page."""
        self._cached[page] = True

    def forget(self, page: int) -> None:
        """The cache no longer holds this page."""
        self._cached[page] = False
        if not self._users[page]:
            self._free.append(page)

    def check(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Compare the books with what sequences (`held`, once for each of them) and the cache really hold.

        Raises:
            PageLeakError: a page is lost, counted twice, or has a wrong number of users.
        """
        users = np.bincount(np.fromiter(held, np.int64), minlength=self.size)
        kept = np.bincount(np.fromiter(cached, np.int64), minlength=self.size)
        free = np.bincount(np.array(self._free, np.int64), minlength=self.size)
        wrong = (users != self._users) | (kept != self._cached) | (free != ((users == 0) & (kept == 0)))
        if wrong.any() or self._in_use != np.count_nonzero(users):
            page = int(np.argmax(wrong))
            raise PageLeakError(
                f"KV pages do not add up: {int(wrong.sum())} of {self.size} are wrong, {self._in_use} counted in use; "
                f"page {page} has {users[page]} users ({self._users[page]} counted), is {kept[page]} times cached "
                f"({int(self._cached[page])} counted) and {free[page]} times free"
            )
