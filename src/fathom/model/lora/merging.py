"""The whole model with an adapter's updates added: for engines that know no adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from fathom.core.adapter import MergeRounding
from fathom.model.language_model import LanguageModel
from fathom.model.lora.low_rank import LowRank


@final
class MergedWeights:
    """A copy of the adapted matrices, made anew when asked; all other tensors are the model's own."""

    def __init__(self, model: LanguageModel) -> None:
        """Take the memory for the copies."""
        self._model = model
        base = model.base_weights()
        self._merged = {name: torch.empty_like(base[name]).detach() for name in model.updates}

    @torch.no_grad()
    def make(self) -> tuple[Mapping[str, Tensor], MergeRounding]:
        """`W + scale * B A` in the model's element type, by the names of the whole model, and what rounding lost.

        The exact sum is taken in float64. The tensors are good until the next call.
        """
        base = self._model.base_weights()
        max_abs, unchanged, updated = 0.0, 0, 0
        for name, update in self._model.updates.items():
            for weight, merged, low in _matrices(base[name], self._merged[name], update):
                exact = weight.double() + low
                merged.copy_(exact)
                max_abs = max(max_abs, float((merged.double() - exact).abs().max()))
                unchanged += int(((merged == weight) & (low != 0)).sum())
                updated += int((low != 0).sum())
        tensors = {name: tensor.detach() for name, tensor in base.items()} | self._merged
        return tensors, MergeRounding(max_abs=max_abs, unchanged=unchanged, updated=updated)


def _matrices(weight: Tensor, merged: Tensor, update: LowRank) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each matrix [O, I], where its copy goes, and its update in float64: one at a time, for they are large."""
    if weight.ndim == 2:
        yield weight, merged, update.exact(update.a, update.b)
    else:
        for parts in zip(weight, merged, update.a, update.b, strict=True):
            yield *parts[:2], update.exact(*parts[2:])
