"""What a chain may forget: its oldest versions, up to an anchor, and never what someone needs.

    v0 anchor, v1, v2, ... v19 | v20 anchor, v21, ... v37, v38, v39 newest
    dropped all together         \\___ kept _____/   \\__ needed ___/

A delta is of no use without the version before it, so the versions before an anchor go all at once, and only when
everything that is needed can be reached from that anchor or a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fathom.sync.chain.links import LinkName


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much is kept."""

    budget_bytes: int
    """What the chain may take."""
    keep_steps: int
    """Versions whose number is at most so far below the newest are kept in any case."""

    def droppable(self, sizes: Mapping[LinkName, int], needed: Collection[LinkName]) -> list[LinkName]:
        """What to remove, in that order, so that what is left never lacks its beginning.

        Args:
            sizes: bytes of each link of the chain, its data included.
            needed: oldest versions that readers and engines need, besides the newest.
        """
        return self._droppable(sizes, needed, self.budget_bytes)

    def wants_anchor(self, sizes: Mapping[LinkName, int], needed: Collection[LinkName], since_anchor: int) -> bool:
        """True when the chain will outgrow its budget unless it can be dropped up to a new anchor.

        `since_anchor`: versions since the last one. As many as are needed in any case must lie between two.
        """
        if since_anchor <= self.keep_steps:
            return False
        dropped = self._droppable(sizes, needed, 0)
        kept = {name: size for name, size in sizes.items() if name not in dropped}
        return self.enough_bytes(kept) > self.budget_bytes

    def enough_bytes(self, sizes: Mapping[LinkName, int]) -> int:
        """A budget that would hold what is kept now until more of it can be dropped."""
        anchor = max((size for name, size in sizes.items() if name.anchor), default=0)
        delta = max((size for name, size in sizes.items() if not name.anchor), default=0)
        return sum(sizes.values()) + anchor + self.keep_steps * delta

    def _droppable(
        self, sizes: Mapping[LinkName, int], needed: Collection[LinkName], budget_bytes: int
    ) -> list[LinkName]:
        if not sizes:
            return []
        newest = max(sizes)
        recent = [name for name in sizes if name.number >= newest.number - self.keep_steps]
        oldest_needed = min(_version(name) for name in [*recent, *needed])
        anchors = sorted(name for name in sizes if name.anchor and _version(name) <= oldest_needed)
        total, left, dropped = sum(sizes.values()), sorted(sizes), list[LinkName]()
        for anchor in anchors[1:]:
            if total <= budget_bytes:
                break
            place = left.index(anchor)
            total -= sum(sizes[name] for name in left[:place])
            dropped += reversed(left[:place])
            left = left[place:]
        return dropped


def _version(name: LinkName) -> tuple[int, int]:
    return (name.incarnation, name.number)
