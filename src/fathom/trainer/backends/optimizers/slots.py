"""The state of a torch optimizer as plain tensors by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fathom.core.errors import CheckpointError

Slots = Callable[[Tensor], tuple[str, ...]]
"""What an optimizer keeps for a master."""


def decayed(masters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay on matrices only, norms and biases are left alone. Empty groups are left out."""
    matrices = [tensor for tensor in masters.values() if tensor.ndim >= 2]
    others = [tensor for tensor in masters.values() if tensor.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def read_slots(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor], slots: Slots) -> dict[str, Tensor]:
    """State as `slot/master`; numbers as int64 scalars. Empty before the first step."""
    return {
        f"{slot}/{name}": torch.as_tensor(optimizer.state[tensor][slot])
        for name, tensor in masters.items()
        if tensor in optimizer.state
        for slot in slots(tensor)
    }


def refuse_other_state(state: Mapping[str, Tensor], masters: Mapping[str, Tensor], slots: Slots) -> None:
    """Raises CheckpointError unless `state` is empty or has exactly these slots of these masters."""
    expected = {f"{slot}/{name}" for name, tensor in masters.items() for slot in slots(tensor)} if state else set[str]()
    if wrong := sorted(expected ^ state.keys()):
        raise CheckpointError(f"optimizer state does not fit the model: {wrong[:5]}; resume with the run's config")


def write_slots(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, Tensor],
    slots: Slots,
    state: Mapping[str, Tensor],
    *,
    shaped: tuple[str, ...],
) -> None:
    """Replace the optimizer's state; `shaped` slots must have their master's shape. Raises CheckpointError."""
    optimizer.state.clear()
    for name, tensor in masters.items() if state else ():
        kept = {slot: _restored(state[f"{slot}/{name}"], tensor) for slot in slots(tensor)}
        if any(slot in kept and kept[slot].shape != tensor.shape for slot in shaped):
            raise CheckpointError(f"optimizer state of {name} has another shape; resume with the run's config")
        optimizer.state[tensor] = {
            slot: int(value) if value.ndim == 0 and value.dtype is torch.int64 else value
            for slot, value in kept.items()
        }


def _restored(value: Tensor, master: Tensor) -> Tensor:
    return value.to(master.device, copy=True)
