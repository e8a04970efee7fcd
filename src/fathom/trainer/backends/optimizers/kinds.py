"""The kinds of optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fathom.config.families import OptimizerKind
from fathom.config.trainer import OptimizerConfig
from fathom.trainer.backends.optimizers.adam8bit import Adam8bit
from fathom.trainer.backends.optimizers.adamw import AdamW
from fathom.trainer.backends.optimizers.muon import Muon
from fathom.trainer.backends.optimizers.port import Optimizer

_Open = Callable[[Mapping[str, nn.Parameter], OptimizerConfig, frozenset[str]], Optimizer]

OPTIMIZERS: dict[OptimizerKind, _Open] = {
    OptimizerKind.ADAMW: lambda masters, config, _: AdamW(masters, config),
    OptimizerKind.MUON: Muon,
    OptimizerKind.ADAM8BIT: lambda masters, config, _: Adam8bit(masters, config),
}


def open_optimizer(
    masters: Mapping[str, nn.Parameter], config: OptimizerConfig, vocabulary: frozenset[str]
) -> Optimizer:
    """A fresh optimizer of `masters`, float32 by name, whose gradients stay allocated.

    `vocabulary`: names of those that have a row for each id of the vocabulary.

    Raises:
        MissingDependencyError: the kind needs a package that is not installed.
    """
    return OPTIMIZERS[config.kind](masters, config, vocabulary)
