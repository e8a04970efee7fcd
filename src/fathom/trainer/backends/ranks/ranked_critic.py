"""A critic over several processes. Letters: N tokens with loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.port import Critic, Report, Update
from fathom.trainer.backends.ranks.ranks import Ranks


@final
class RankedCritic:
    """See `port.Critic` and `RankedBackend`: the same, of values."""

    def __init__(self, critic: Critic, ranks: Ranks) -> None:
        self._critic = critic
        self._ranks = ranks

    @property
    def warmup_steps(self) -> int:
        """See `port.Critic`."""
        return self._critic.warmup_steps

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """See `port.Critic`."""
        return self._critic.masters

    def begin(self, weights: Mapping[str, Tensor], steps: int) -> None:
        """See `port.Critic`."""
        self._critic.begin(weights, steps)

    def values(self, rows: PackedRows) -> Tensor:
        """See `port.Critic`."""
        mine = self._ranks.share(rows.lengths)
        own = self._critic.values(rows.take(mine)) if mine else torch.zeros(0)
        return self._ranks.complete(own, rows.places(mine), len(rows.targets))

    def accumulate(self, rows: PackedRows, loss_of: Callable[[Tensor], tuple[Tensor, Report]]) -> Report:
        """See `port.Critic`."""
        mine = self._ranks.share(rows.lengths)
        places, total = rows.places(mine), len(rows.targets)
        if not mine:
            return loss_of(self._ranks.complete(torch.zeros(0), places, total))[1]
        return self._critic.accumulate(rows.take(mine), lambda own: loss_of(self._ranks.complete(own, places, total)))

    def discard(self) -> None:
        """See `port.Critic`."""
        self._critic.discard()

    def update(self) -> Update:
        """See `port.Critic`."""
        self._ranks.add_up_gradients(self._critic.masters)
        return self._critic.update()
