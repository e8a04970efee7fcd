"""Which tokens survive top-k, top-p and min-p.

The survivors are always the first of the tokens in order of likelihood (equally likely ones in order of their ids), so
a row needs a count and a threshold. Only blocks that can hold a survivor are looked at.

Letters: R rows, V vocabulary, B blocks of a row, C values of a block, M blocks looked at, W candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.model.distribution.blockwise import Blockwise, in_blocks

_MASS_ROUNDING = 1e-6
"""A kept set whose mass misses top_p by this much has reached it: sums of float32 probabilities are no better."""

_GUESS = 64
"""Likeliest tokens (at least) that are looked at first for top_p."""

_SLACK = 1e-3
"""Nats by which a threshold is lowered, much more than its rounding; what it lets in is counted exactly afterwards."""

_TOGETHER = 1024
"""Rows with at most this many candidates are ordered together."""


def kept_sets(scaled: Tensor, params: Sequence[SamplingParams]) -> KeptSets | None:
    """The tokens of each row of float32 [R, V] scaled logits that survive its top_k, top_p and min_p, each on what the
    one before left. A row from which nothing is removed, or with a value that is not finite, is *full*.

    The most likely token always survives. None: no row asks for truncation.
    """
    cut = [row for row, own in enumerate(params) if own.truncates]
    if not cut:
        return None
    ids = [np.empty(0, np.int32)] * len(params)
    among = scaled if len(cut) == len(params) else scaled[cut]
    for row, own in zip(cut, _Cutter(among, [params[row] for row in cut]).kept_ids(), strict=True):
        ids[row] = own
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in ids])]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=np.concatenate(ids))


class _Cutter:
    """Rows that all ask for truncation."""

    def __init__(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        self._vocab = scaled.shape[1]
        blockwise = Blockwise.of(scaled)
        self._blocks = in_blocks(scaled)
        self._block_tops = blockwise.block_tops.cpu().numpy()
        tops = blockwise.tops.cpu().numpy().astype(np.float64)
        normaliser = blockwise.normaliser.cpu().numpy().astype(np.float64)
        self._finite = np.isfinite(tops) & np.isfinite(normaliser)
        self._tops, self._normaliser = (np.where(self._finite, part, 0.0) for part in (tops, normaliser))
        self._top_k = np.array([min(own.top_k, self._vocab) for own in params])
        self._top_p = np.array([own.top_p if own.top_p < 1 else np.inf for own in params])
        with np.errstate(divide="ignore"):
            self._floor = self._tops + np.log([own.min_p for own in params])

    def kept_ids(self) -> list[np.ndarray]:
        """int32: the kept ids of each row, ascending; empty: full."""
        found: list[np.ndarray] = [np.empty(0, np.int32)] * len(self._tops)
        rows = np.flatnonzero(self._finite)
        enough = self._enough()
        guess = np.where(self._top_k > 0, self._reach(self._top_k), np.maximum(enough, self._guess()))
        while len(rows):
            candidates = self._candidates(rows, guess[rows])
            counts = self._survivors(rows, candidates)
            known = (self._top_k[rows] > 0) | (counts < candidates.counts) | (guess[rows] <= enough[rows])
            for index in np.flatnonzero(known).tolist():
                found[rows[index]] = candidates.first(index, int(counts[index]), self._vocab)
            rows, guess = rows[~known], enough
        return found

    def _enough(self) -> np.ndarray:
        """float64 [R]: thresholds that leave all that top_p and min_p keep."""
        with np.errstate(divide="ignore"):
            # Of values below it the whole vocabulary would have a mass of 1 - top_p at most.
            of_top_p = self._tops + self._normaliser + np.log(np.maximum(1 - self._top_p, 0) / self._vocab)
        return np.maximum(of_top_p, self._floor) - _SLACK

    def _guess(self) -> np.ndarray:
        """float64 [R]: thresholds that leave enough for top_p in most cases."""
        return np.where(self._top_p < 1, self._reach(np.full(len(self._tops), _GUESS)), -np.inf)

    def _reach(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [R]: thresholds that leave at least int64 [R] `tokens`: as many blocks have such a value."""
        rows, blocks = self._block_tops.shape
        descending = -np.sort(-self._block_tops, axis=1)
        reach = descending[np.arange(rows), np.clip(tokens, 1, blocks) - 1].astype(np.float64)
        return np.where(tokens <= blocks, reach, -np.inf)

    def _candidates(self, rows: np.ndarray, thresholds: np.ndarray) -> _Candidates:
        """The values of int64 [R] `rows` that are not below float64 [R] `thresholds`."""
        least = np.nextafter(thresholds.astype(np.float32), np.float32(-np.inf))
        row, block = np.nonzero(self._block_tops[rows] >= least[:, None])
        device = self._blocks.device
        chosen = torch.from_numpy(rows[row]).to(device), torch.from_numpy(block).to(device)
        values = self._blocks[chosen].cpu().numpy()
        inside = np.flatnonzero(values >= least[row, None])
        at, place = np.divmod(inside, values.shape[1])
        return _Candidates(
            counts=np.bincount(row[at], minlength=len(rows)),
            ids=(block[at] * values.shape[1] + place).astype(np.int32),
            values=values.ravel()[inside],
        )

    def _survivors(self, rows: np.ndarray, candidates: _Candidates) -> np.ndarray:
        """int64 [R]: how many of the candidates survive, were there no others."""
        counts = np.zeros(len(rows), np.int64)
        narrow = candidates.counts <= _TOGETHER
        for chosen in (np.flatnonzero(narrow), *np.flatnonzero(~narrow)[:, None]):
            counts[chosen] = self._count(rows[chosen], candidates.descending(chosen), candidates.counts[chosen])
        return counts

    def _count(self, rows: np.ndarray, descending: np.ndarray, real: np.ndarray) -> np.ndarray:
        """int64 [R]: survivors among float64 [R, W] candidates, of which int64 [R] are `real`."""
        probs = np.exp(descending - (self._tops + self._normaliser)[rows, None])
        mass = np.cumsum(probs, axis=1)
        top_k = self._top_k[rows]
        total = np.where(top_k > 0, mass[np.arange(len(rows)), top_k - 1], 1.0)
        rank = np.arange(descending.shape[1])
        kept = rank < np.where(top_k > 0, top_k, real)[:, None]
        kept &= mass - probs < (total * (self._top_p[rows] - _MASS_ROUNDING))[:, None]
        kept &= descending >= self._floor[rows, None]
        return np.maximum(kept.sum(axis=1), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Tokens of R rows that may survive, row after row, ids ascending in each."""

    counts: np.ndarray
    """int64 [R]: candidates of each row."""
    ids: np.ndarray
    """int32: token ids."""
    values: np.ndarray
    """float32: their values."""

    def descending(self, rows: np.ndarray) -> np.ndarray:
        """float64 [R, W]: the values of these rows, largest first, then -inf."""
        counts = self.counts[rows]
        filled = np.full((len(rows), int(counts.max(initial=0))), -np.inf, np.float32)
        chosen = np.repeat(np.isin(np.arange(len(self.counts)), rows), self.counts)
        filled[np.arange(filled.shape[1]) < counts[:, None]] = self.values[chosen]
        return -np.sort(-filled, axis=1).astype(np.float64)

    def first(self, row: int, count: int, vocab: int) -> np.ndarray:
        """int32: the ids of the `count` largest values of a row, ascending; empty when that is all of `vocab`."""
        if count == vocab:
            return np.empty(0, np.int32)
        end = int(self.counts[: row + 1].sum())
        ids, values = (part[end - int(self.counts[row]) : end] for part in (self.ids, self.values))
        least = np.partition(values, len(values) - count)[len(values) - count]
        ties = values == least
        room = count - int(np.count_nonzero(values > least))
        return ids[(values > least) | (ties & (np.cumsum(ties) <= room))]
