"""Muon (`torch.optim.Muon`) for the matrices inside the model, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from fathom.config.trainer import OptimizerConfig
from fathom.trainer.backends.optimizers.adamw import AdamW
from fathom.trainer.backends.optimizers.slots import read_slots, refuse_other_state, set_rate, write_slots


@final
class Muon:
    """See `port.Optimizer`. Muon moves every two-dimensional master that has no axis of vocabulary.

    Embeddings and output heads, norms, biases and fused experts (three dimensions) go by AdamW. Muon's steps are scaled
    by 0.2 sqrt(longer side), to the size of AdamW's, so that one learning rate and one weight decay serve both
    (arXiv 2502.16982). Orthogonalisation is by Newton-Schulz in bfloat16.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], config: OptimizerConfig, vocabulary: frozenset[str]
    ) -> None:
        """`vocabulary`: names of the masters that have a row for each id of the vocabulary."""
        self._matrices = {n: t for n, t in masters.items() if t.ndim == 2 and n not in vocabulary}
        self._rest = AdamW({n: t for n, t in masters.items() if n not in self._matrices}, config)
        self._muon = (
            torch.optim.Muon(
                list(self._matrices.values()),
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            if self._matrices
            else None
        )

    @property
    def matrices(self) -> frozenset[str]:
        """Names of the masters that Muon moves."""
        return frozenset(self._matrices)

    def step(self, lr: float) -> None:
        """See `port.Optimizer`."""
        if self._muon is not None:
            set_rate(self._muon, lr)
            self._muon.step()
        self._rest.step(lr)

    def state(self) -> dict[str, Tensor]:
        """See `port.Optimizer`: momentum (float32, the master's shape) of matrices, AdamW's state of the rest."""
        mine = {} if self._muon is None else read_slots(self._muon, self._matrices, _slots)
        return mine | self._rest.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See `port.Optimizer`."""
        mine = {name: tensor for name, tensor in state.items() if name.startswith(f"{_MOMENTUM}/")}
        refuse_other_state(mine, self._matrices, _slots)
        self._rest.restore({name: tensor for name, tensor in state.items() if name not in mine})
        if self._muon is not None:
            write_slots(self._muon, self._matrices, _slots, mine, shaped=(_MOMENTUM,))


_MOMENTUM = "momentum_buffer"


def _slots(_: Tensor) -> tuple[str, ...]:
    return (_MOMENTUM,)
