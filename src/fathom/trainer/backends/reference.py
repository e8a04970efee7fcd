"""The KL reference: the weights RL started from."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

from torch import Tensor

from fathom.model.language_model import LanguageModel


@final
class ReferencePolicy:
    """A frozen copy of published weights, computed with by the policy's own module: there is no second one."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights`, the cast tensors."""
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

    @contextmanager
    def takes_over(self, model: LanguageModel) -> Generator[None]:
        """Inside, `model` computes with the reference. Never enter between a forward and its backward."""
        policy = {name: tensor.detach() for name, tensor in model.weights().items()}
        model.use(self.weights)
        try:
            yield
        finally:
            model.use(policy)
