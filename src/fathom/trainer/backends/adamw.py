"""AdamW over float32 masters, with state that is plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from fathom.config.trainer import OptimizerConfig
from fathom.core.errors import CheckpointError

_SLOTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter: two moments (float32, the parameter's shape) and a count (float32, scalar)."""


@final
class AdamW:
    """`torch.optim.AdamW` by parameter name. Weight decay on matrices only: norms and biases are left alone."""

    def __init__(self, masters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        """Fresh moments for `masters`; their gradients must stay allocated."""
        self._masters = masters
        matrices = [tensor for tensor in masters.values() if tensor.ndim >= 2]
        others = [tensor for tensor in masters.values() if tensor.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,  # one pass over memory: on the CPU 3 to 5 times faster than the other forms
        )

    def step(self, lr: float) -> None:
        """Move the masters by their gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Moments and counts as `slot/parameter`. Empty before the first step."""
        return {
            f"{slot}/{name}": self._optimizer.state[tensor][slot]
            for name, tensor in self._masters.items()
            if tensor in self._optimizer.state
            for slot in _SLOTS
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Become what `state` returned. Raises CheckpointError when the names or shapes are not these masters'."""
        expected = {f"{slot}/{name}" for name in self._masters for slot in _SLOTS} if state else set[str]()
        if wrong := sorted(expected ^ state.keys()):
            raise CheckpointError(f"optimizer state does not fit the model: {wrong[:5]}; resume with the run's config")
        self._optimizer.state.clear()
        for name, tensor in self._masters.items() if state else ():
            slots = {slot: state[f"{slot}/{name}"].to(tensor.device, copy=True) for slot in _SLOTS}
            if slots["exp_avg"].shape != tensor.shape:
                raise CheckpointError(f"optimizer state of {name} has another shape; resume with the run's config")
            self._optimizer.state[tensor] = slots
