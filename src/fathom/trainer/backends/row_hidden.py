"""The body's forward over packed rows. Letters: N tokens with loss, H hidden size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.routing import Routing
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.prefixes import segments_of


def hidden_before_loss(
    model: LanguageModel, rows: PackedRows, routing: Routing | None = None, *, share_prefixes: bool
) -> Tensor:
    """[N, H]: the hidden states before the tokens with loss. Differentiable.

    With `share_prefixes`, what rows begin with alike is computed once and read by all of them. Rows with recorded
    routes are computed each for itself: two rows may have gone to other experts with the same tokens.
    """
    segments = segments_of(rows.input_ids, rows.lengths) if share_prefixes and rows.routes is None else None
    if segments is None:
        plan, ids, positions, sources = PackedAttention(rows.lengths), rows.input_ids, rows.position_ids, rows.sources
    else:
        plan = PackedAttention(segments.lengths, segments.parents)
        ids, positions = rows.input_ids[segments.tokens], rows.position_ids[segments.tokens]
        sources = segments.computed[rows.sources]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(model.device)

    return model.hidden(tensor(ids), tensor(positions), plan, routing).index_select(0, tensor(sources))
