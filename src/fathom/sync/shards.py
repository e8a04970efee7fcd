"""Parts of tensors: which rank holds which slice, and where the bytes of a slice lie.

A `Box` is a slice of one tensor, a range in every dimension. FSDP shards are boxes that are short in dimension 0,
tensor-parallel ones in dimension 0 or 1, a pipeline stage holds whole tensors and lacks others. The memory of a shard
is contiguous and row-major in the box's own shape; so it is a sequence of *runs*, byte ranges that are contiguous in
the whole tensor too, in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import msgspec


class Box(msgspec.Struct, frozen=True, tag="box.1"):
    """A slice of a tensor. Of a scalar it has no dimensions, and is the whole."""

    bounds: tuple[tuple[int, int], ...]
    """Per dimension: the first index and the one after the last, 0 <= first <= end."""

    def __post_init__(self) -> None:
        for start, stop in self.bounds:
            if not 0 <= start <= stop:
                raise ValueError(f"{self.bounds} is no box; give 0 <= first <= end in each dimension")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the slice."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index an array with."""
        return tuple(slice(start, stop) for start, stop in self.bounds)

    def intersect(self, other: Box) -> Box | None:
        """What both have in common. None: not one element, or they are of tensors of different dimensions."""
        if len(self.bounds) != len(other.bounds):
            return None
        pairs = zip(self.bounds, other.bounds, strict=True)
        common = tuple((max(mine[0], its[0]), min(mine[1], its[1])) for mine, its in pairs)
        return Box(common) if all(start < stop for start, stop in common) else None

    def without(self, other: Box) -> tuple[Box, ...]:
        """The rest of it, as boxes that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        rest: list[Box] = []
        bounds = list(self.bounds)
        for dim, (start, stop) in enumerate(common.bounds):
            first, end = bounds[dim]
            sides = [side for side in ((first, start), (stop, end)) if side[0] < side[1]]
            rest += [Box((*bounds[:dim], side, *bounds[dim + 1 :])) for side in sides]
            bounds[dim] = (start, stop)
        return tuple(rest)

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the first corner of `outer`. Raises `ValueError` when they are not in it."""
        if self.elements and self.intersect(outer) != self:
            raise ValueError(f"{self.bounds} does not lie within {outer.bounds}")
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return Box(tuple((start - origin, stop - origin) for (start, stop), (origin, _) in pairs))

    def runs(self, outer: Box) -> Iterator[tuple[int, int]]:
        """Its elements in the memory of `outer`, which holds them: (first, count) of each run, ascending.

        In the box's own memory the runs follow one another. Runs that touch are one.
        """
        if not self.elements:
            return
        relative, shape = self.within(outer).bounds, outer.shape
        cut = len(shape)  # dimensions from here on are whole, so that one index of the dimension before is one run
        while cut and relative[cut - 1] == (0, shape[cut - 1]):
            cut -= 1
        if not cut:
            yield 0, self.elements
            return
        row = math.prod(shape[cut:])
        start, stop = relative[cut - 1]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(cut - 1)]
        for index in product(*(range(*bound) for bound in relative[: cut - 1])):
            origin = sum(place * stride for place, stride in zip(index, strides, strict=True))
            yield origin + start * row, (stop - start) * row


class Shard(msgspec.Struct, frozen=True, tag="shard.1"):
    """What a rank holds of one tensor."""

    name: str
    """The tensor, by its name in the manifest."""
    box: Box
    """Which slice of it."""


def copies(box: Box, source: Box, into: Box, item_bytes: int) -> Iterator[tuple[int, int, int]]:
    """How the elements of `box` get from the memory of `source` to that of `into`, both of which hold them.

    Yields (first byte in `source`, first byte in `into`, bytes), ascending, as few as there can be.
    """
    ours, theirs = box.runs(source), box.runs(into)
    start = place = left = room = 0
    while True:
        if not left:
            start, left = next(ours, (0, 0))
        if not room:
            place, room = next(theirs, (0, 0))
        count = min(left, room)
        if not count:
            return
        yield start * item_bytes, place * item_bytes, count * item_bytes
        start, place, left, room = start + count, place + count, left - count, room - count


def span_boxes(shape: Sequence[int], first: int, end: int) -> tuple[Box, ...]:
    """Cut elements `first` to `end` of a tensor's row-major order into boxes, each contiguous in it, ascending.

    They are at most two for each dimension, and one less: a cut row, whole rows, a cut row.
    """
    if first >= end:
        return ()
    if not shape:
        return (Box(()),)
    row = math.prod(shape[1:])
    head, tail = -(-first // row), end // row
    if head > tail:  # within one row
        return _below(tail, span_boxes(shape[1:], first - tail * row, end - tail * row))
    before = _below(head - 1, span_boxes(shape[1:], first - (head - 1) * row, row)) if first < head * row else ()
    after = _below(tail, span_boxes(shape[1:], 0, end - tail * row))
    inner = (Box(((head, tail), *((0, size) for size in shape[1:]))),) if head < tail else ()
    return (*before, *inner, *after)


def uncovered(whole: Box, parts: Iterable[Box]) -> Box | None:
    """A part of `whole` that none of `parts` covers. None: it is covered."""
    open_parts = [whole] if whole.elements else []
    for part in parts:
        open_parts = [rest for piece in open_parts for rest in piece.without(part)]
    return open_parts[0] if open_parts else None


def _below(index: int, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    return tuple(Box(((index, index + 1), *box.bounds)) for box in boxes)
