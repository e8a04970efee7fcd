"""Experts with an update of each: the grouped product of `transformers`, with the update's two beside each of its own.

The base's numbers are those of the implementation it stands for, to the bit: where B is zero, so is the difference.
Letters: T tokens, E experts chosen per token, S = T * E, H hidden size, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fathom.model.lora.low_rank import LowRank, grouped

EXPERTS_WITH_UPDATES = "fathom_lora"
"""Its name among the implementations."""
UPDATES_ATTRIBUTE = "fathom_updates"
"""Where a layer's experts keep their updates, by name of the matrix."""


def _forward(experts: Any, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """[T, H] of hidden states [T, H], ids int64 [T, E] and gates [T, E]."""
    updates: dict[str, LowRank] = vars(experts)[UPDATES_ATTRIBUTE]
    tokens, chosen = ids.shape
    sorted_ids, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(sorted_ids.float(), bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows = hidden[order // chosen]
    up = _product(rows, experts.gate_up_proj, ends, updates.get("gate_up_proj"))
    down = _product(experts._apply_gate(up), experts.down_proj, ends, updates.get("down_proj"))
    weighted = down * gates.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighted[back].view(tokens, chosen, -1).sum(dim=1).to(hidden.dtype)


def _product(rows: Tensor, weights: Tensor, ends: Tensor, update: LowRank | None) -> Tensor:
    out = grouped(rows, weights, ends)
    return out if update is None else out + update.grouped_update(rows, ends)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_WITH_UPDATES, _forward)
