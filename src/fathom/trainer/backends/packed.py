"""What one forward computes on. Letters: R rows, T input tokens of all rows, N tokens with loss of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from fathom.core.errors import RecordError
from fathom.core.records.bias import TokenBias, join_biases
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.row import Row
from fathom.core.records.scores import IdLists
from fathom.core.records.trajectory import KeptSets


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows laid end to end: each attends to itself alone and counts its positions from 0.

    A row's input ends right before its last token with loss: nothing after that changes anything.
    """

    input_ids: np.ndarray
    """int64 [T]: the rows' input tokens."""
    position_ids: np.ndarray
    """int64 [T]: place of each token in its own row."""
    lengths: tuple[int, ...]
    """[R]: input tokens of each row; they sum to T."""
    sources: np.ndarray
    """int64 [N]: indices in T whose outputs predict the tokens with loss: each the one before its target."""
    targets: np.ndarray
    """int64 [N]: ids of the tokens with loss."""
    loss_lengths: tuple[int, ...]
    """[R]: tokens with loss of each row; they sum to N."""
    temperature: np.ndarray
    """float32 [N]: what the logits are divided by."""
    kept: KeptSets | None
    """Kept sets of the N tokens. None: full vocabulary everywhere."""
    bias: TokenBias | None
    """Logit biases of the N tokens. None: no token has one."""
    routes: np.ndarray | None
    """uint8 or uint16 [T, L, E]: recorded experts of the input tokens. None: a row has none."""
    forced: bool
    """The recorded experts are to be used instead of those that the live routers choose."""
    compared: IdLists | None = None
    """More ids at each of the N tokens, to be compared with a teacher. None: a row has none."""

    @classmethod
    def of_rows(cls, rows: Sequence[Row], *, forced: bool = False) -> Self:
        """Pack training rows, at least one. `forced`: replay their routes.

        Raises:
            RecordError: routes are to be forced and a row has none.
        """
        routes = _joined_routes(rows)
        if forced and routes is None:
            raise RecordError("routes are to be replayed, and a row has none; such rows must not reach the forward")
        return cls._lay(
            [row.token_ids for row in rows],
            [row.positions for row in rows],
            temperature=np.concatenate([row.temperature for row in rows]),
            kept=_joined_kept(rows),
            bias=join_biases([row.bias for row in rows], [len(row.positions) for row in rows]),
            routes=routes,
            forced=forced,
            compared=_joined_ids(rows),
        )

    @classmethod
    def of_demonstrations(cls, demonstrations: Sequence[Demonstration]) -> Self:
        """Pack supervised data, at least one: temperature 1, full vocabulary."""
        positions = [np.flatnonzero(demonstration.loss_mask) for demonstration in demonstrations]
        return cls._lay(
            [demonstration.token_ids for demonstration in demonstrations],
            positions,
            temperature=np.ones(sum(map(len, positions)), dtype=np.float32),
            kept=None,
            bias=None,
            routes=None,
            forced=False,
        )

    @classmethod
    def _lay(
        cls,
        token_ids: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
        temperature: np.ndarray,
        kept: KeptSets | None,
        bias: TokenBias | None,
        routes: np.ndarray | None,
        forced: bool,
        compared: IdLists | None = None,
    ) -> Self:
        inputs = [ids[: places[-1]] for ids, places in zip(token_ids, positions, strict=True)]
        lengths = [len(row) for row in inputs]
        starts = np.cumsum([0, *lengths[:-1]])
        sources = [start + places - 1 for start, places in zip(starts, positions, strict=True)]
        targets = [ids[places] for ids, places in zip(token_ids, positions, strict=True)]
        return cls(
            input_ids=np.concatenate(inputs).astype(np.int64),
            position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
            lengths=tuple(lengths),
            sources=np.concatenate(sources).astype(np.int64),
            targets=np.concatenate(targets).astype(np.int64),
            loss_lengths=tuple(len(places) for places in positions),
            temperature=temperature,
            kept=kept,
            bias=bias,
            routes=routes,
            forced=forced,
            compared=compared,
        )

    def places(self, rows: Sequence[int]) -> np.ndarray:
        """int64 [n]: where among the N tokens with loss those of some rows are, row after row."""
        ends = np.cumsum(self.loss_lengths)
        parts = [np.arange(ends[row] - self.loss_lengths[row], ends[row]) for row in rows]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def take(self, rows: Sequence[int]) -> PackedRows:
        """Some of the rows, at least one, in the order given."""
        starts = np.cumsum([0, *self.lengths])
        tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        places, moved = self.places(rows), np.cumsum([0, *(self.lengths[row] for row in rows)])
        shifts = np.repeat(
            [moved[i] - starts[row] for i, row in enumerate(rows)], [self.loss_lengths[row] for row in rows]
        )
        return PackedRows(
            input_ids=self.input_ids[tokens],
            position_ids=self.position_ids[tokens],
            lengths=tuple(self.lengths[row] for row in rows),
            sources=self.sources[places] + shifts,
            targets=self.targets[places],
            loss_lengths=tuple(self.loss_lengths[row] for row in rows),
            temperature=self.temperature[places],
            kept=self.kept.select(places) if self.kept is not None else None,
            bias=self.bias.select(places) if self.bias is not None else None,
            routes=self.routes[tokens] if self.routes is not None else None,
            forced=self.forced,
            compared=self.compared.take(places) if self.compared is not None else None,
        )

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array [N] back into the rows' parts."""
        return np.split(values, np.cumsum(self.loss_lengths)[:-1])


def _joined_routes(rows: Sequence[Row]) -> np.ndarray | None:
    """The routes of the rows' input tokens end to end; None where a row has none."""
    parts = [row.routes[: row.positions[-1]] for row in rows if row.routes is not None]
    return np.concatenate(parts) if len(parts) == len(rows) else None


def _joined_ids(rows: Sequence[Row]) -> IdLists | None:
    """The ids compared with teachers, end to end; None where a row has none."""
    compared = [row.teacher.compared for row in rows if row.teacher is not None and row.teacher.compared is not None]
    if len(compared) < len(rows):
        return None
    widths = np.concatenate([np.diff(each.lists.offsets) for each in compared])
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    return IdLists(offsets=offsets, ids=np.concatenate([each.lists.ids for each in compared]))


def _joined_kept(rows: Sequence[Row]) -> KeptSets | None:
    """The rows' kept sets end to end; rows without any count as *full* (empty ranges)."""
    if all(row.kept is None for row in rows):
        return None
    widths = [np.zeros(len(row.positions), np.int64) if row.kept is None else np.diff(row.kept.offsets) for row in rows]
    ids = [row.kept.ids for row in rows if row.kept is not None]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(widths))]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=np.concatenate(ids).astype(np.int32))
