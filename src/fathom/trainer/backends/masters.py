"""float32 masters behind the tensors that the forward uses and that are published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, final

import torch
from torch import Tensor, nn


class Masters(Protocol):
    """The numbers the optimizer updates, under the parameters' canonical names. Gradients collect in their `.grad`."""

    @property
    def tensors(self) -> Mapping[str, nn.Parameter]:
        """float32 masters by name, in the order of names; each always has a gradient tensor."""
        ...

    @property
    def separate(self) -> bool:
        """False: the parameters are the masters, there is no second copy."""
        ...

    def publish(self) -> None:
        """Cast the masters into the parameters."""
        ...


@final
class SharedMasters:
    """A float32 forward: the parameters are the masters."""

    separate = False

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.tensors = dict(parameters)
        zero_gradients(self.tensors)

    def publish(self) -> None:
        """Nothing to cast."""


@final
class SeparateMasters:
    """A forward in a narrower dtype: masters of their own, fed by hooks.

    Each backward's gradient of a parameter is added to its master's in float32 and freed, so gradients of several
    micro-batches never round to the narrow dtype on their way to the sum.
    """

    separate = True

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.tensors = {name: nn.Parameter(tensor.detach().float().contiguous()) for name, tensor in parameters.items()}
        zero_gradients(self.tensors)
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(_collect_into(self.tensors[name]))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the parameters' dtype, in place."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.tensors[name])


def masters_of(weights: Mapping[str, Tensor]) -> Masters:
    """Masters of the trainable tensors among `weights` (a model's live tensors)."""
    parameters = {name: tensor for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)}
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    narrow = any(parameter.dtype is not torch.float32 for parameter in trainable.values())
    return SeparateMasters(trainable) if narrow else SharedMasters(trainable)


def zero_gradients(tensors: Mapping[str, Tensor]) -> None:
    """Give every tensor a gradient of zeros, reusing what it has."""
    for tensor in tensors.values():
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        else:
            tensor.grad.zero_()


_ADDED_AT_ONCE = 2**20
"""Elements. Adding across dtypes makes a temporary copy; a small one stays in memory that is already mapped, which is
several times faster for an embedding."""


def _collect_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        if parameter.grad is not None and master.grad is not None:
            parts = parameter.grad.reshape(-1).split(_ADDED_AT_ONCE)
            for total, part in zip(master.grad.view(-1).split(_ADDED_AT_ONCE), parts, strict=True):
                total.add_(part)
            parameter.grad = None

    return collect
