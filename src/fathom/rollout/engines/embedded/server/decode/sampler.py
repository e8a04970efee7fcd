"""Draws tokens. The probability reported is computed by the function that the trainer uses.

A row's token, log-probability and kept set depend, on a CPU to the bit, on its own logits, parameters and uniform
alone. Letters: B rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathom.core.records.bias import TokenBias
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.model.distribution.blockwise import Blockwise
from fathom.model.distribution.kept_sets import kept_sets
from fathom.model.logprobs import Choice, choices, scaled_logits, token_logprobs


@dataclass(slots=True, kw_only=True)
class Draw:
    """One token per row."""

    token_ids: np.ndarray
    """int64 [B]."""
    logprobs: np.ndarray
    """float32 [B]: under the distribution drawn from."""
    kept: KeptSets | None
    """Kept sets of the B tokens. None: no row asks for truncation."""
    raw_logprobs: np.ndarray | None
    """float32 [B]: at temperature 1 over the full vocabulary, without bias. None: nobody asked."""


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray, raw: bool) -> Draw:
    """Draw by inverting the cumulative distribution, in order of the ids, at `uniforms`.

    Args:
        logits: float32 [B, V].
        params: the distribution of each row.
        uniforms: float64 [B] in [0, 1).
        raw: also compute raw log-probabilities.
    """
    temperature = torch.tensor([each.temperature for each in params], dtype=torch.float32, device=logits.device)
    scaled = scaled_logits(logits, temperature, TokenBias.of([each.logit_bias for each in params]))
    kept = kept_sets(scaled, params)
    token_ids = np.empty(len(params), np.int64)
    logprobs = np.empty(len(params), np.float32)
    whole = Choice(rows=np.arange(len(params)), ids=None, values=scaled)
    for choice in [whole] if kept is None else choices(scaled, kept):
        token_ids[choice.rows], logprobs[choice.rows] = _draw(choice, uniforms[choice.rows])
    return Draw(
        token_ids=token_ids, logprobs=logprobs, kept=kept, raw_logprobs=_raw(logits, token_ids) if raw else None
    )


def _draw(choice: Choice, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R] token ids and float32 [R] log-probabilities."""
    blockwise = Blockwise.of(choice.values)
    places = blockwise.invert(uniforms)
    there = torch.from_numpy(places).to(choice.values.device)
    logprobs = blockwise.logprobs(choice.values, there).cpu().numpy()
    if choice.ids is None:
        return places, logprobs
    return choice.ids.gather(1, there.unsqueeze(1)).squeeze(1).cpu().numpy(), logprobs


def _raw(logits: Tensor, token_ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(token_ids).to(logits.device)
    return token_logprobs(logits, tokens, torch.ones(len(tokens), device=logits.device), None).cpu().numpy()
