"""An adapter of a model: which matrices have an update, and the updates' tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.core.adapter import AdapterForm
from fathom.core.errors import ConfigError
from fathom.model.lora.experts import EXPERTS_WITH_UPDATES, UPDATES_ATTRIBUTE
from fathom.model.lora.low_rank import LowRank

_EXPERT_MATRICES = ("gate_up_proj", "down_proj")
_SUFFIXES = (".lora_A", ".lora_B")
_SHOWN = 20


@final
class Adapter:
    """Updates on a model that is frozen from now on. The model goes on under the names it had."""

    def __init__(self, model: PreTrainedModel, form: AdapterForm, seed: int) -> None:
        """Adapt the matrices that `form.targets` name, all if it names none.

        Args:
            model: where it will stay.
            form: rank, scale and targets.
            seed: fixes A, whatever the element type; torch's own random state is left as it was.

        Raises:
            ConfigError: a target is not there, or cannot be adapted; says which there are.
        """
        matrices = dict(adaptable(model))
        chosen = {name: _targets_of(name, form.targets) for name in matrices}
        _refuse_unmatched(form, set().union(*chosen.values()), matrices)
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self._updates = {
            name: _fresh(weight, form, generator) for name, weight in sorted(matrices.items()) if chosen[name]
        }
        found = form.targets or tuple(sorted({short_name(name) for name in self._updates}))
        self.form = msgspec.structs.replace(form, targets=found)
        for name, update in self._updates.items():
            _install(model, name, update)

    @property
    def updates(self) -> dict[str, LowRank]:
        """By name of the matrix: a parameter's without `.weight`."""
        return dict(self._updates)

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters by canonical name, `<matrix>.lora_A` and `<matrix>.lora_B`, in the order of names."""
        found: dict[str, Tensor] = {}
        for name, update in self._updates.items():
            found |= {name + suffix: part for suffix, part in zip(_SUFFIXES, (update.a, update.b), strict=True)}
        return dict(sorted(found.items()))


def adaptable(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Matrices that may have an update, [O, I] or, of experts, [X, O, I]: all but router, embedding and output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module.weight
        elif name.endswith(".experts"):
            own = dict(module.named_parameters(recurse=False))
            yield from ((f"{name}.{matrix}", own[matrix]) for matrix in _EXPERT_MATRICES if matrix in own)


def short_name(name: str) -> str:
    """How a matrix is named among targets: its last part; with `experts.` before it where it is of experts."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-2] == "experts" else parts[-1:])


def _targets_of(name: str, targets: tuple[str, ...]) -> set[str]:
    """The targets that mean this matrix: whole parts at the end of its name, no substrings."""
    if not targets:
        return {short_name(name)}
    own = short_name(name)
    return {each for each in targets if own == each or ("." in each and name.endswith(f".{each}"))}


def _refuse_unmatched(form: AdapterForm, matched: set[str], matrices: Iterable[str]) -> None:
    if missing := [target for target in form.targets if target not in matched]:
        there = sorted({short_name(name) for name in matrices})
        raise ConfigError(
            f"lora.target_modules names {', '.join(missing)}, which this model does not have or which cannot be "
            f"adapted (routers, embedding and output head stay as they are); choose from {', '.join(there[:_SHOWN])}"
        )


def _fresh(weight: Tensor, form: AdapterForm, generator: torch.Generator) -> LowRank:
    """A as a linear layer of its size begins, by float32 numbers on the CPU; B zero."""
    *stack, outputs, inputs = weight.shape
    bound = 1.0 / math.sqrt(inputs)
    a = torch.empty(*stack, form.rank, inputs).uniform_(-bound, bound, generator=generator)
    b = torch.zeros(*stack, outputs, form.rank)
    return LowRank(a=nn.Parameter(a.to(weight)), b=nn.Parameter(b.to(weight)), scale=form.scale)


def _install(model: PreTrainedModel, name: str, update: LowRank) -> None:
    path, _, matrix = name.rpartition(".")
    if path.endswith(".experts"):
        experts = model.get_submodule(path)
        vars(experts).setdefault(UPDATES_ATTRIBUTE, {})[matrix] = update
        model.set_experts_implementation(EXPERTS_WITH_UPDATES)
    else:
        model.get_submodule(name).register_forward_hook(_adding(update))


def _adding(update: LowRank) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + update.update(args[0])

    return add
