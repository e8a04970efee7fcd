"""Processes that train one model together, and what they add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fathom.core.errors import FathomError
from fathom.sync.digest import digest


@final
class Ranks:
    """The group that this process belongs to, over `torch.distributed` with Gloo. Every call is made by all alike."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """See `join`."""
        self.rank = rank
        """This process, from 0."""
        self.size = size
        """Processes."""
        self._timeout_s = timeout_s

    @classmethod
    def join(cls, rank: int, size: int, meeting: Path, *, timeout_s: float) -> Self:
        """Meet the others at a file that does not exist yet, the same for all; waits for them.

        Raises:
            FathomError: they did not come in time.
        """
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise FathomError(f"trainer process {rank} of {size} met nobody at {meeting}: {error}") from error
        return cls(rank, size, timeout_s)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def add_up(self, tensor: Tensor) -> None:
        """Replace a CPU tensor by the sum of everybody's, the same bits everywhere."""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise FathomError(
                f"trainer process {self.rank} of {self.size} lost the others, or waited for them for more than "
                f"{self._timeout_s:g} s: {error}"
            ) from error

    def add_up_gradients(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the gradients of `tensors` by the sums of everybody's, in one exchange."""
        gradients = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
        together = torch.cat([gradient.flatten().cpu() for gradient in gradients])
        self.add_up(together)
        for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def complete(self, own: Tensor, places: np.ndarray, total: int) -> Tensor:
        """[total] numbers, of which this process has those at `places`, int64 [n], and the others the others.

        Only its own have a gradient: the gradient of a loss of all of them, added up over the processes, is whole.
        """
        index = torch.from_numpy(places)
        known = torch.zeros(total, dtype=own.dtype).index_copy(0, index, own.detach())
        self.add_up(known)
        return known.index_copy(0, index, own)

    def refuse_different(self, weights: Mapping[str, Tensor]) -> None:
        """Raises FathomError unless everybody has the same weights."""
        mine = torch.frombuffer(bytearray.fromhex(digest(weights)), dtype=torch.uint8).to(torch.int64)
        sums = torch.cat((mine, mine.square()))
        self.add_up(sums)
        if not torch.equal(sums, self.size * torch.cat((mine, mine.square()))):
            raise FathomError("the trainer processes hold different weights; start them from the same folder")

    def share(self, lengths: Sequence[int]) -> list[int]:
        """Indices of this process's rows, ascending: longest first, each to the process with the fewest tokens."""
        loads, mine = [0] * self.size, list[int]()
        for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
            lightest = loads.index(min(loads))
            loads[lightest] += lengths[row]
            if lightest == self.rank:
                mine.append(row)
        return sorted(mine)
