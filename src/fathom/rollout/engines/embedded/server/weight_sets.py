"""The weights an engine holds: what serves, what is staged, and what pinned requests still need.

Memory is taken once per set and used again: touching fresh pages costs several times the copy itself. Two sets are
enough while versions come and go; a pinned version holds a third one. The model's own memory, tensor by tensor as it
was loaded, serves nothing and is let go when the first version is committed: sets are blocks (`sync/held.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from fathom.core.ids import PolicyVersion
from fathom.sync.held import room_like


@final
@dataclass(slots=True, kw_only=True, eq=False)
class WeightSet:
    """One complete copy of the model's tensors."""

    tensors: dict[str, Tensor]
    """By canonical name."""
    version: PolicyVersion | None
    """What lies in it. None: nothing that may serve."""
    digest: str = ""
    """Root digest (hex) read back from this memory. Empty: not verified."""
    users: int = 0
    """Pinned requests that need it, waiting or running."""

    @property
    def number(self) -> int:
        """Version number, for the tokens it makes."""
        if self.version is None:
            raise AssertionError("weights without a version made a token")
        return self.version.number


@final
class WeightSets:
    """Which set is which. Used on the decode loop's thread; only the bytes of a staging set are written elsewhere."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are the model's own; they serve nothing until a version is committed."""
        self.live = WeightSet(tensors={name: tensor.detach() for name, tensor in tensors.items()}, version=None)
        self.staged: WeightSet | None = None
        self._pinned_last: WeightSet | None = None
        spare = self._fresh()
        for name, tensor in self.live.tensors.items():
            spare.tensors[name].copy_(tensor)  # so that its pages are there
        self._retired = [spare]

    def pin(self, version: PolicyVersion) -> WeightSet | None:
        """The set that holds a committed `version`, with one more user. None: it is not held.

        The version pinned last stays until another one is pinned, so that an evaluation may send its requests one
        after the other.
        """
        for weights in (self.live, *self._retired):
            if weights.version == version:
                weights.users += 1
                self._pinned_last = weights
                return weights
        return None

    def take_staging(self) -> WeightSet:
        """A set to receive a version in. What was staged or lay in it is forgotten."""
        self.rollback()  # what was never committed may not be found by `pin`
        idle = [weights for weights in self._retired if not weights.users and weights is not self._pinned_last]
        weights = idle[0] if idle else self._fresh()
        if idle:
            self._retired.remove(weights)
        weights.version, weights.digest = None, ""
        return weights

    def give_back(self, weights: WeightSet) -> None:
        """Keep a set's memory for the next version; what lies in it is worthless."""
        weights.version, weights.digest = None, ""
        self._retired.insert(0, weights)

    def rollback(self) -> None:
        """Forget what is staged."""
        if self.staged is not None:
            self.give_back(self.staged)
            self.staged = None

    def commit(self) -> None:
        """The staged set is live from now on; the live one retires."""
        if self.staged is None:
            raise AssertionError("commit without a staged version")
        if self.live.version is not None:
            self._retired.append(self.live)
        self.live, self.staged = self.staged, None

    def _fresh(self) -> WeightSet:
        """Memory that is not touched here: its first pages cost the thread that receives, not the decode loop."""
        return WeightSet(tensors=room_like(self.live.tensors), version=None)
