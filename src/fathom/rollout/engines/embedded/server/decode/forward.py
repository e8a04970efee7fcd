"""The model's side of a step: what the decoder asks of it, and nothing else.

Letters: B sequences, T tokens, P pages of the longest sequence, N positions, V vocabulary, L layers with
experts, E experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from torch import Tensor

from fathom.core.ports.engine import ScoreRequest
from fathom.core.records.scores import IdScores
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One packed forward: the last tokens of sequences that decode, each with its drafts, then chunks of contexts."""

    tokens: np.ndarray
    """int32 [T]: new tokens, sequence after sequence."""
    positions: np.ndarray
    """int64 [T]: index of each in its sequence."""
    tables: np.ndarray
    """int64 [B, P]: pages of each sequence."""
    starts: np.ndarray
    """int64 [B]: tokens of each sequence whose KV is there already."""
    lengths: np.ndarray
    """int64 [B]: new tokens of each sequence."""
    sampled: np.ndarray
    """int64 [N]: indices into T; the logits after these tokens are wanted."""
    routed: bool
    """Record which experts each token goes to, beside its KV."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Answers to a `ScoreRequest`."""

    logprobs: np.ndarray
    """float32 [N]: of the given tokens."""
    top: IdScores | None = None
    """The likeliest ids. None: not asked for."""
    others: np.ndarray | None = None
    """float32 [K]: of the other ids asked about. None: not asked for."""


class Forward(Protocol):
    """Computes batches. What belongs to a token beside its KV lives where its KV lives: by page and offset."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of the weights, for the records."""
        ...

    @property
    def kernels(self) -> str:
        """Kernel mode, for the records."""
        ...

    @property
    def has_experts(self) -> bool:
        """It can record routes."""
        ...

    def use(self, weights: WeightSet) -> None:
        """Compute by these weights from now on."""
        ...

    def logits(self, weights: WeightSet, batch: Batch) -> Tensor:
        """Store the KV of a batch in its pages; float32 [N, V] logits after the sampled positions."""
        ...

    def routes(self, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """[n, L, E]: the experts that the tokens at these places, int64 [n], went to, as they were recorded."""
        ...

    def copy_page(self, from_page: int, to_page: int) -> None:
        """Give a page the content of another."""
        ...

    def score(self, weights: WeightSet, request: ScoreRequest) -> Scores:
        """Log-probabilities of given tokens and ids, without touching any page."""
        ...
