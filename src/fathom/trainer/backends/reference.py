"""The KL reference: the weights RL started from, later ones, or an average of them all."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from fathom.config.families import ReferenceKind
from fathom.config.trainer import ReferenceConfig
from fathom.model.language_model import LanguageModel
from fathom.sync.digest import digest


@final
class ReferencePolicy:
    """A copy of published weights, computed with by the policy's own module: there is no second one."""

    def __init__(
        self, config: ReferenceConfig, weights: Mapping[str, Tensor], masters: Mapping[str, Tensor] | None
    ) -> None:
        """Copy `weights`, the cast tensors, and for an average `masters`, float32 by name.

        `masters` is None where the weights themselves are float32: there is nothing finer to average.
        """
        self._config = config
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        """The cast weights."""
        self.averages: dict[str, Tensor] | None = None
        """float32 averages of the masters, whose cast the weights are. None: nothing finer than the weights is kept."""
        if config.kind is ReferenceKind.EMA and masters is not None:
            self.averages = {name: tensor.detach().clone() for name, tensor in masters.items()}
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """Root digest (hex) of the weights, computed once after each change."""
        if self._digest is None:
            self._digest = digest(self.weights)
        return self._digest

    @torch.no_grad()
    def follow(self, step: int, weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        """Take notice of the update that made `step`. `masters` are the trainable tensors, float32."""
        match self._config.kind:
            case ReferenceKind.FROZEN:
                return
            case ReferenceKind.PERIODIC:
                assert self._config.every_steps is not None, "ReferenceConfig requires it"
                if step % self._config.every_steps:
                    return
                for name, tensor in weights.items():
                    self.weights[name].copy_(tensor)
            case ReferenceKind.EMA:
                assert self._config.decay is not None, "ReferenceConfig requires it"
                for name, master in masters.items():
                    average = self.averages[name] if self.averages is not None else self.weights[name]
                    average.lerp_(master, 1 - self._config.decay)
                    if self.averages is not None:
                        self.weights[name].copy_(average)
        self._digest = None

    @contextmanager
    def takes_over(self, model: LanguageModel) -> Generator[None]:
        """Inside, `model` computes with the reference. Never enter between a forward and its backward."""
        policy = {name: tensor.detach() for name, tensor in model.weights().items()}
        model.use(self.weights)
        try:
            yield
        finally:
            model.use(policy)
