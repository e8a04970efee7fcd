"""The model's forward for running sequences, by whichever weights are asked for.

Letters: B sequences, V vocabulary, N scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.core.ports.engine import ScoreRequest
from fathom.model.attention import AttentionPlan, PackedAttention
from fathom.model.cached_attention import KvCache
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_logprobs
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet

KERNELS = "sdpa"
"""The kernel mode, for the records."""


@final
class Compute:
    """Model and KV cache. One thread uses it."""

    def __init__(self, model: LanguageModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache
        self._using: WeightSet | None = None
        self.vocab_size = model.shape.vocab_size
        self.dtype = str(model.dtype).removeprefix("torch.")

    def prefill(self, weights: WeightSet, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> Tensor:
        """Compute whole contexts into their slots; float32 [B, V] logits after the last token of each."""
        lengths = [len(each) for each in tokens]
        plan = self._cache.prefill(slots.tolist(), [0] * len(lengths), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden = self._hidden(weights, np.concatenate(tokens), positions, plan)
        last = torch.from_numpy(np.cumsum(lengths) - 1).to(hidden.device)
        return self._model.logits(hidden[last])

    def decode(self, weights: WeightSet, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Compute one token per slot, int [B] at int64 [B]; float32 [B, V] logits after it."""
        plan = self._cache.decode(slots.tolist(), positions.tolist())
        return self._model.logits(self._hidden(weights, tokens, positions, plan))

    def copy_prefix(self, from_slot: int, to_slots: Sequence[int], length: int) -> None:
        """Give other slots the KV of the first `length` tokens of a slot."""
        self._cache.copy_prefix(from_slot, to_slots, length)

    def score(self, weights: WeightSet, request: ScoreRequest) -> np.ndarray:
        """float32 [N] log-probabilities of given tokens, by one forward without a cache."""
        total = len(request.token_ids)
        plan = PackedAttention([total])
        hidden = self._hidden(weights, request.token_ids, np.arange(total), plan)
        before = torch.from_numpy(request.positions - 1).to(hidden.device)
        targets = torch.from_numpy(request.token_ids[request.positions].astype(np.int64)).to(hidden.device)
        temperature = torch.from_numpy(request.temperature).to(hidden.device)
        return head_logprobs(self._model, hidden[before], targets, temperature, request.kept).cpu().numpy()

    def use(self, weights: WeightSet) -> None:
        """Compute by these weights from now on."""
        if self._using is not weights:
            self._model.use(weights.tensors)
            self._using = weights

    def _hidden(self, weights: WeightSet, tokens: np.ndarray, positions: np.ndarray, plan: AttentionPlan) -> Tensor:
        self.use(weights)
        device = self._model.device
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        return self._model.hidden(ids, torch.from_numpy(positions).to(device), plan)
