"""How ranks cut a model between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fathom.sync.shards import Box

_NO_OWNERS: Mapping[str, frozenset[int]] = {}


def cut(shape: Sequence[int], dim: int, part: int, parts: int) -> Box:
    """Part `part` of `parts` equal ones along a dimension; where it does not divide, the first ones are longer by one.

    >>> cut((5, 2), 0, 1, 2).bounds
    ((3, 5), (0, 2))
    """
    length, longer = divmod(shape[dim], parts)
    start = part * length + min(part, longer)
    bounds = [(0, size) for size in shape]
    bounds[dim] = (start, start + length + (part < longer))
    return Box(tuple(bounds))


def parallel(
    shapes: Mapping[str, Sequence[int]],
    ranks: int,
    dims: Mapping[str, int],
    owners: Mapping[str, frozenset[int]] = _NO_OWNERS,
) -> tuple[dict[str, Box], ...]:
    """By rank, the slice of each tensor that it holds.

    Args:
        shapes: every tensor.
        ranks: how many there are.
        dims: tensors that are cut, and along which dimension: tensor-parallel ones, or stacked experts along 0. All
            others are held whole.
        owners: tensors that only some ranks hold, as those of single experts. All others are held by all.
    """
    everyone = frozenset(range(ranks))
    return tuple(
        {
            name: cut(shape, dims[name], rank, ranks) if name in dims else Box.whole(shape)
            for name, shape in shapes.items()
            if rank in owners.get(name, everyone)
        }
        for rank in range(ranks)
    )
