"""Who sends what to whom. Pure: every receiving rank computes its own part, and all computed parts fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from fathom.core.errors import PayloadError
from fathom.sync.shards import Box, uncovered

PIECE_BYTES = 64 << 20
"""Pieces of a transfer are not larger, so that a source can pack any of them, and loads can be balanced."""

Holding = Mapping[str, Box] | None
"""What a source rank holds: by tensor the slice. A tensor that is not named is not held. None: every tensor, whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A slice that a receiving rank needs."""

    name: str
    """The tensor."""
    box: Box
    """Which part of it."""
    item_bytes: int
    """Bytes of one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a wanted slice, and who sends it."""

    source: int
    """Rank of the source."""
    name: str
    """The tensor."""
    box: Box
    """Which part of it; it lies within what the source holds."""
    size_bytes: int
    """Its size."""


def assign(sources: int, engines: int, ranks: int) -> dict[tuple[int, int], int]:
    """The source of each (engine, engine rank), where every source holds everything (`algorithms.md` G.2).

    The first pairs are 1:1 in order. Each further target goes to the source with the fewest targets among those that
    serve the same engine rank already, so that what was converted for one is used again; where there is none, to the
    next one round robin.

    >>> assign(4, 2, 3)
    {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 1, (1, 2): 2}
    """
    assigned: dict[tuple[int, int], int] = {}
    loads, turn = [0] * sources, 0
    for number, (engine, rank) in enumerate(product(range(engines), range(ranks))):
        serving = sorted({source for (_, other), source in assigned.items() if other == rank})
        if number < sources:
            source = number
        elif serving:
            source = min(serving, key=lambda candidate: loads[candidate])
        else:
            source, turn = turn % sources, turn + 1
        assigned[engine, rank] = source
        loads[source] += 1
    return assigned


def team(sources: int, engines: int, ranks: int, engine: int, rank: int) -> tuple[int, ...]:
    """The sources that one target prefers: the assigned one first, then its share of those that no target needs."""
    spare = range(engines * ranks + engine * ranks + rank, sources, engines * ranks)
    return (assign(sources, engines, ranks)[engine, rank], *spare)


def pieces(
    wanted: Sequence[Wanted], holdings: Sequence[Holding], preferred: Sequence[int], piece_bytes: int = PIECE_BYTES
) -> tuple[Piece, ...]:
    """Cover each wanted slice exactly once by pieces, each within what its source holds; in the order of `wanted`.

    None is larger than `piece_bytes`, unless one element is. A part that `preferred` sources hold comes from one of
    them, else from any holder. Among the candidates the bytes are balanced: where all hold everything, the loads of two
    differ by at most one piece.

    Raises:
        PayloadError: nobody holds a part. Names tensor and part.
    """
    cells = [cell for each in wanted for cell in _cells(each, holdings, preferred, piece_bytes)]
    loads = dict.fromkeys(range(len(holdings)), 0)
    chosen: dict[int, Piece] = {}
    for index in sorted(range(len(cells)), key=lambda index: (len(cells[index].holders) > 1, -cells[index].size_bytes)):
        cell = cells[index]
        source = min(cell.holders, key=lambda holder: loads[holder])
        loads[source] += cell.size_bytes
        chosen[index] = Piece(source=source, name=cell.name, box=cell.box, size_bytes=cell.size_bytes)
    return tuple(chosen[index] for index in range(len(cells)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A part that some sources hold whole."""

    name: str
    box: Box
    size_bytes: int
    holders: tuple[int, ...]


def _cells(wanted: Wanted, holdings: Sequence[Holding], preferred: Sequence[int], piece_bytes: int) -> Iterator[_Cell]:
    """Cut a slice along the edges of what is held, and to size."""
    if not wanted.box.elements:
        return
    held: dict[int, Box] = {}
    others = ((preferred[0] + step) % len(holdings) for step in range(len(holdings)))
    for source in (*preferred, *(source for source in others if source not in preferred)):
        common = _held(holdings[source], wanted)
        if common is not None:
            held[source] = common
    parts = set(held.values())
    if parts == {wanted.box}:  # as most are
        boxes: Iterable[Box] = parts
    else:
        gap = uncovered(wanted.box, parts)
        if gap is not None:
            raise PayloadError(
                f"no source holds {gap.bounds} of tensor {wanted.name!r}; shards must cover every tensor"
            )
        boxes = _grid(wanted.box, parts)
    for box in boxes:
        holders = [source for source, part in held.items() if part == box or box.intersect(part) == box]
        near = tuple(source for source in holders if source in preferred) or tuple(holders)
        for part in _to_size(box, max(1, piece_bytes // wanted.item_bytes)):
            yield _Cell(name=wanted.name, box=part, size_bytes=part.elements * wanted.item_bytes, holders=near)


def _held(holding: Holding, wanted: Wanted) -> Box | None:
    if holding is None:
        return wanted.box
    box = holding.get(wanted.name)
    return box if box is None or box == wanted.box else box.intersect(wanted.box)


def _grid(whole: Box, parts: set[Box]) -> Iterator[Box]:
    """The smallest boxes between the edges of `parts`."""
    edges = [
        sorted({*bound, *(edge for part in parts for edge in part.bounds[dim])})
        for dim, bound in enumerate(whole.bounds)
    ]
    for bounds in product(*(pairwise(edge) for edge in edges)):
        yield Box(bounds)


def _to_size(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most `most` elements, cut along the first dimensions."""
    if box.elements <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    first, end = box.bounds[dim]
    step = max(1, most // (box.elements // (end - first)))
    for start in range(first, end, step):
        bounds = (*box.bounds[:dim], (start, min(start + step, end)), *box.bounds[dim + 1 :])
        yield from _to_size(Box(bounds), most)
