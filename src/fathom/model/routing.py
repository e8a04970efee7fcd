"""Which experts a token went to: recorded in one forward, replayed in another.

Letters: T tokens of a packed forward, L layers with experts, X experts of a layer, E experts chosen per token.

A router scores all experts of its layer and chooses E of them; their outputs are summed with weights, the gates. In a
replay the choice is the recorded one and a constant; the gates are computed from the live logits, as the family does
it, so gradients reach the router. What one forward records or replays travels with that forward, from layer to layer:
a recomputation in the backward gets the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fathom.core.errors import RecordError
from fathom.model.families import ModelFamily

ROUTING_ARGUMENT = "routing"
"""The keyword argument of a model's forward that a `Routing` travels in."""

_BYTE = 256
"""Experts whose ids fit into one byte."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """How many experts a model has, and where."""

    layers: int
    """Layers with experts."""
    experts: int
    """Routed experts of each such layer."""
    per_token: int
    """Experts that a token goes to in each such layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest unsigned type that holds an expert's id: one byte up to 256 experts, else two."""
        return np.dtype(np.uint8 if self.experts <= _BYTE else np.uint16)

    def fault(self, routes: np.ndarray, tokens: int) -> str:
        """Why `routes` are not the complete routes of `tokens` tokens. Empty: they are."""
        expected = (tokens, self.layers, self.per_token)
        if routes.shape != expected or routes.dtype != self.dtype:
            return f"routes are {routes.dtype} {list(routes.shape)}, not {self.dtype} {list(expected)}"
        if routes.size and int(routes.max()) >= self.experts:
            return f"routes name expert {int(routes.max())} of {self.experts}"
        ordered = np.sort(routes, axis=-1)
        if np.any(ordered[..., 1:] == ordered[..., :-1]):
            return "routes name an expert twice for one token and layer"
        return ""


@final
class Routing:
    """The routes of one packed forward: the routers' own choices are recorded; recorded ones can be forced instead.

    With forced routes that are the routers' own, in the same order, the forward is the same to the bit.
    """

    def __init__(
        self,
        shape: ExpertShape,
        tokens: int,
        device: torch.device,
        *,
        forced: np.ndarray | None = None,
        margins: bool = False,
    ) -> None:
        """For one forward of `tokens` tokens.

        Args:
            shape: the model's.
            tokens: T.
            device: where the model is.
            forced: `shape.dtype` [T, L, E], the experts to use. None: the routers choose.
            margins: also record by how much each choice was made.

        Raises:
            RecordError: `forced` is not complete, or not of this model.
        """
        if forced is not None and (fault := shape.fault(forced, tokens)):
            raise RecordError(fault)
        size = (tokens, shape.layers, shape.per_token)
        dtype = torch.uint8 if shape.dtype == np.uint8 else torch.uint16
        self._chosen = torch.zeros(size, dtype=dtype, device=device)
        self._forced = torch.from_numpy(forced).to(device) if forced is not None else None
        self._margins = torch.zeros(size[:2], dtype=torch.float32, device=device) if margins else None
        self.seconds = 0.0
        """Seconds spent on it so far, as the CPU sees it."""

    @property
    def chosen(self) -> np.ndarray:
        """`shape.dtype` [T, L, E]: what the routers chose by themselves, forced or not; in the order of the gates."""
        return self._chosen.cpu().numpy()

    @property
    def margins(self) -> np.ndarray | None:
        """float32 [T, L]: lowest score chosen minus highest score not chosen. None: not asked for.

        Scores are what the choice was made by: probabilities, or biased sigmoids of the groups chosen from. Infinite
        where nothing was left to choose from.
        """
        return self._margins.cpu().numpy() if self._margins is not None else None

    def route(self, layer: int, rule: GateRule, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take note of a router's choice; the gates and ids to use instead, or None.

        Args:
            layer: index among the layers with experts.
            rule: how this router makes gates.
            logits: [T, X]. Further rows are padding: they are not recorded, and go where they go.
            chosen: int64 [T, E].
        """
        started = time.perf_counter()
        tokens = len(self._chosen)
        self._chosen[:, layer].copy_(chosen[:tokens])
        if self._margins is not None:
            self._margins[:, layer] = rule.margin(logits[:tokens].detach(), chosen[:tokens])
        used = None
        if self._forced is not None:
            ids = torch.cat((self._forced[:, layer].long(), chosen[tokens:]))
            used = rule.gates(logits, ids), ids
        self.seconds += time.perf_counter() - started
        return used


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """How a router turns logits into gates: one formula for all families.

    `gates = scale * score[ids] / (sum(score[ids]) + epsilon)`; without `normalise` there is no division.
    """

    sigmoid: bool
    """Scores are sigmoids of the logits. False: softmax over all experts."""
    normalise: bool
    """Divide by the sum over the chosen experts."""
    epsilon: float
    """Added to that sum."""
    scale: float
    """Factor of the gates."""
    narrow: bool
    """Gates are cast to the logits' dtype. False: float32."""
    groups: int
    """The choice is limited to some of this many groups of experts. 1: it is free."""
    bias: Tensor | None
    """float32 [X]: added to the scores for the choice alone. None: there is none."""

    def gates(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[T, E] gates of the experts `ids`, int64 [T, E], from logits [T, X]. Differentiable."""
        gates = self._scores(logits).gather(1, ids)
        if self.normalise:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + self.epsilon)
        gates = gates * self.scale
        return gates.to(logits.dtype) if self.narrow else gates

    def margin(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """float32 [T]: see `Routing.margins`."""
        scores = self._scores(logits)
        if self.bias is not None:
            scores = scores + self.bias
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, value=True)
        others = ~taken
        if self.groups > 1:
            grouped = taken.unflatten(1, (self.groups, -1))
            others &= grouped.any(dim=-1, keepdim=True).expand_as(grouped).flatten(1)
        lowest = scores.gather(1, chosen).min(dim=1).values
        return lowest - scores.masked_fill(~others, -torch.inf).max(dim=1).values

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.sigmoid else torch.softmax(logits, dim=-1, dtype=torch.float32)


def expert_shape(model: PreTrainedModel) -> ExpertShape | None:
    """How many experts a model has. None: a dense one."""
    gates = [layer.mlp.gate for layer in _expert_layers(model)]
    if not gates:
        return None
    return ExpertShape(layers=len(gates), experts=gates[0].num_experts, per_token=gates[0].top_k)


def install_routing(model: PreTrainedModel, family: ModelFamily) -> None:
    """Let a `Routing` given to the model's forward see, and replace, what its routers choose.

    The model stays where it is from now on, and of its type.

    A layer's attention is handed the forward's arguments, its router is not; they run in this order, also where a
    backward computes the layer again. So each layer keeps what its attention was given until its router has run.
    """
    for place, layer in enumerate(_expert_layers(model)):
        seat = _Seat(place, gate_rule(family, layer.mlp.gate))
        layer.self_attn.register_forward_pre_hook(seat.sit, with_kwargs=True)
        layer.mlp.gate.register_forward_hook(seat.rise)


def gate_rule(family: ModelFamily, router: Any) -> GateRule:
    """How a router of this family makes gates."""
    match family:
        case ModelFamily.QWEN3_MOE:
            normalise, narrow = bool(router.norm_topk_prob), True
        case ModelFamily.MIXTRAL:
            normalise, narrow = True, False
        case ModelFamily.DEEPSEEK_V3:
            return GateRule(
                sigmoid=True,
                normalise=bool(router.norm_topk_prob),
                epsilon=1e-20,
                scale=float(router.routed_scaling_factor),
                narrow=False,
                groups=int(router.num_group),
                bias=router.e_score_correction_bias,
            )
        case _:
            raise ValueError(f"models of type {family} have no routers")
    return GateRule(sigmoid=False, normalise=normalise, epsilon=0.0, scale=1.0, narrow=narrow, groups=1, bias=None)


def _expert_layers(model: PreTrainedModel) -> list[Any]:
    layers: Any = model.base_model.layers
    return [layer for layer in layers if hasattr(layer.mlp, "experts")]


@final
class _Seat:
    """What one layer was given, between its attention and its router."""

    def __init__(self, place: int, rule: GateRule) -> None:
        self._place = place
        self._rule = rule
        self._routing: Routing | None = None

    def sit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before attention."""
        self._routing = kwargs.get(ROUTING_ARGUMENT)

    def rise(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """After the router."""
        routing, self._routing = self._routing, None
        if routing is None:
            return None
        logits, _, chosen = output
        used = routing.route(self._place, self._rule, logits, chosen)
        return (logits, *used) if used is not None else None
