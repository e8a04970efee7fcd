"""What was computed before, as a tree of pages: from token ids to the pages that hold their KV.

A child of the root holds the first page of some sequences, its children their second pages, and so on. A page that is
not full has no children. No sibling's tokens begin with those of another: the longer of two holds both.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import final

import numpy as np

from fathom.rollout.engines.embedded.server.kv.page_pool import PagePool

Root = Hashable
"""What else must be equal for KV to be the same, besides the tokens: the weights that computed it, above all."""

_TOKEN_BYTES = 4
_KEY = np.dtype(">u4")
"""Token ids as bytes that are ordered like the ids."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class PageNode:
    """One page of the tree."""

    key: bytes
    """Its token ids."""
    page: int
    """Its number. -1: a root, which has none."""
    parent: PageNode | None
    """The page before it. None: a root, or no longer in the tree."""
    used: int = 0
    """When it was used last, by the tree's clock."""
    children: dict[bytes, PageNode] = field(default_factory=dict["bytes", "PageNode"])
    """Pages that may follow, by their ids."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of the children, in order: those that share most with a key stand next to it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Cached KV of the beginning of a sequence. Valid until the tree changes."""

    path: tuple[PageNode, ...] = ()
    """Full pages."""
    tail_of: PageNode | None = None
    """A page whose first `tail` tokens follow. None: there is none."""
    tail: int = 0
    """Tokens to copy out of it."""

    @property
    def pages(self) -> list[int]:
        """Full pages."""
        return [node.page for node in self.path]

    def tokens(self, page_tokens: int) -> int:
        """How many tokens were found, with full pages of `page_tokens`."""
        return len(self.path) * page_tokens + self.tail


@final
class PrefixTree:
    """Holds pages of the pool until they are evicted, least recently used leaf first, or all are forgotten."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[Root, PageNode] = {}
        self._pages = 0
        self._clock = 0
        self._serial = count()
        self._oldest: list[tuple[int, int, PageNode]] = []
        """Heap of leaves by their last use; entries that were overtaken by another use stay until they come up."""

    def find(self, root: Root, tokens: np.ndarray) -> Hit:
        """The longest beginning of int32 `tokens` that is cached."""
        node = self._roots.get(root)
        if node is None:
            return Hit()
        path: list[PageNode] = []
        for key in self._chunks(tokens):
            child = node.children.get(key)
            if child is None or len(key) < self._page_tokens * _TOKEN_BYTES:
                tail, tail_of = _closest(node, key)
                return Hit(path=tuple(path), tail_of=tail_of, tail=tail)
            node = child
            path.append(node)
        return Hit(path=tuple(path))

    def touch(self, hit: Hit) -> None:
        """What was found is used now."""
        self._clock += 1
        for node in hit.path:
            self._use(node)
        if hit.tail_of is not None:
            self._use(hit.tail_of)

    def insert(self, root: Root, tokens: np.ndarray, pages: Sequence[int]) -> list[int]:
        """Remember that `pages` hold the KV of int32 `tokens`, the last one perhaps in part.

        Returns the pages to use from now on: where a full page is cached already, that is the cached one.
        """
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = PageNode(key=b"", page=-1, parent=None)
        self._clock += 1
        chosen = list(pages)
        for index, key in enumerate(self._chunks(tokens)):
            child = node.children.get(key)
            if child is not None and len(key) == self._page_tokens * _TOKEN_BYTES:
                chosen[index] = child.page
            elif child is None:
                child = self._add(node, key, pages[index])
            if child is None:
                break
            self._use(child)
            node = child
        return chosen

    def evict(self, count: int) -> None:
        """Forget pages that no sequence needs, until `count` became free or none is left."""
        in_use: list[tuple[int, int, PageNode]] = []
        while count > 0 and self._oldest:
            entry = heapq.heappop(self._oldest)
            used, _, node = entry
            if node.used != used or node.children or node.parent is None:
                continue
            if self._pool.used(node.page):
                in_use.append(entry)
                continue
            self._remove(node)
            count -= 1
        for entry in in_use:
            heapq.heappush(self._oldest, entry)

    def clear(self) -> None:
        """Forget everything."""
        for page in self.pages():
            self._pool.forget(page)
        self._roots.clear()
        self._oldest.clear()
        self._pages = 0

    def pages(self) -> Iterator[int]:
        """Every page it holds."""
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            yield node.page

    def _chunks(self, tokens: np.ndarray) -> Iterator[bytes]:
        data, size = tokens.astype(_KEY).tobytes(), self._page_tokens * _TOKEN_BYTES
        return (data[start : start + size] for start in range(0, len(data), size))

    def _add(self, parent: PageNode, key: bytes, page: int) -> PageNode | None:
        """A new child. None: a sibling holds these tokens and more."""
        at = bisect_left(parent.keys, key)
        if at < len(parent.keys) and parent.keys[at].startswith(key):
            return None
        if at and key.startswith(parent.keys[at - 1]):
            self._detach(parent.children[parent.keys[at - 1]])
        node = PageNode(key=key, page=page, parent=parent)
        insort(parent.keys, key)
        parent.children[key] = node
        self._pool.keep(page)
        self._pages += 1
        return node

    def _remove(self, node: PageNode) -> None:
        """Forget a leaf; its parent may become one, and a root without children goes."""
        parent = node.parent
        assert parent is not None
        self._detach(node)
        if parent.children:
            return
        if parent.parent is not None:
            self._push(parent)
        else:
            self._roots = {root: node for root, node in self._roots.items() if node is not parent}

    def _detach(self, node: PageNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        node.parent = None
        self._pages -= 1
        self._pool.forget(node.page)

    def _use(self, node: PageNode) -> None:
        node.used = self._clock
        if not node.children:
            self._push(node)

    def _push(self, node: PageNode) -> None:
        heapq.heappush(self._oldest, (node.used, next(self._serial), node))
        if len(self._oldest) > 4 * self._pages + 64:
            self._oldest = [entry for entry in self._oldest if _stands(entry)]
            heapq.heapify(self._oldest)


def _stands(entry: tuple[int, int, PageNode]) -> bool:
    used, _, node = entry
    return node.used == used and not node.children and node.parent is not None


def _closest(node: PageNode, key: bytes) -> tuple[int, PageNode | None]:
    """How many tokens of `key` the child that shares most of them shares. (0, None): none shares any."""
    at = bisect_left(node.keys, key)
    best, closest = 0, None
    for sibling in node.keys[max(0, at - 1) : at + 1]:
        shared = _shared_tokens(sibling, key)
        if shared > best:
            best, closest = shared, node.children[sibling]
    return best, closest


def _shared_tokens(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], _KEY) != np.frombuffer(other[:size], _KEY)
    return int(differ.argmax()) if differ.any() else size // _TOKEN_BYTES
