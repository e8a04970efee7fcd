"""The forward of a language model with its keys and values in pages.

Letters: T tokens, N positions, V vocabulary.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.core.ports.engine import ScoreRequest
from fathom.model.attention import AttentionPlan, PackedAttention
from fathom.model.id_logprobs import head_id_logprobs, head_likeliest
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.model.paged_attention import PAGE_TOKENS, KvPages
from fathom.model.routing import Routing
from fathom.rollout.engines.embedded.server.decode.forward import Batch, Scores
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet


@final
class ModelForward:
    """Model and KV pages. One thread uses it."""

    def __init__(self, model: LanguageModel, kv: KvPages) -> None:
        self._model = model
        self._kv = kv
        self._using: WeightSet | None = None
        experts = model.shape.experts
        size = (kv.pages, PAGE_TOKENS, experts.layers, experts.per_token) if experts else (0, 0, 0, 0)
        self._routes = np.zeros(size, experts.dtype if experts else np.uint8)
        self.vocab_size = model.shape.vocab_size
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.kernels = model.kernels

    @property
    def has_experts(self) -> bool:
        """See `Forward.has_experts`."""
        return self._model.shape.experts is not None

    def use(self, weights: WeightSet) -> None:
        """See `Forward.use`."""
        if self._using is not weights:
            self._model.use(weights.tensors)
            self._using = weights

    def logits(self, weights: WeightSet, batch: Batch) -> Tensor:
        """See `Forward.logits`."""
        plan = self._kv.plan(batch.tables, batch.starts, batch.lengths)
        routing = self._model.routing(len(batch.tokens)) if batch.routed else None
        hidden = self._hidden(weights, batch.tokens, batch.positions, plan, routing)
        if routing is not None:
            rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
            pages = batch.tables[rows, batch.positions // PAGE_TOKENS]
            self._routes[pages, batch.positions % PAGE_TOKENS] = routing.chosen
        return self._model.logits(hidden[torch.from_numpy(batch.sampled).to(hidden.device)])

    def copy_page(self, from_page: int, to_page: int) -> None:
        """See `Forward.copy_page`."""
        self._kv.copy(from_page, to_page)
        if self.has_experts:
            self._routes[to_page] = self._routes[from_page]

    def routes(self, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """See `Forward.routes`."""
        return self._routes[pages, offsets]

    def score(self, weights: WeightSet, request: ScoreRequest) -> Scores:
        """See `Forward.score`."""
        total = len(request.token_ids)
        plan = PackedAttention([total])
        hidden = self._hidden(weights, request.token_ids, np.arange(total), plan)
        before = torch.from_numpy(request.positions - 1).to(hidden.device)
        targets = torch.from_numpy(request.token_ids[request.positions].astype(np.int64)).to(hidden.device)
        temperature = torch.from_numpy(request.temperature).to(hidden.device)
        states, kept, bias = hidden[before], request.kept, request.bias
        scored = head_outputs(self._model, states, targets, temperature, kept, bias).logprobs
        top = head_likeliest(self._model, states, temperature, kept, bias, request.top) if request.top else None
        others = None
        if request.others is not None:
            others = head_id_logprobs(self._model, states, temperature, kept, bias, request.others).cpu().numpy()
        return Scores(logprobs=scored.cpu().numpy(), top=top, others=others)

    def _hidden(
        self,
        weights: WeightSet,
        tokens: np.ndarray,
        positions: np.ndarray,
        plan: AttentionPlan,
        routing: Routing | None = None,
    ) -> Tensor:
        """[T, H]: the one place where the model is called."""
        self.use(weights)
        device = self._model.device
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        return self._model.hidden(ids, torch.from_numpy(positions).to(device), plan, routing)
