"""Plans: the published pairing, every byte of every slice exactly once, from a source that holds it, in balance."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import PayloadError
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.layouts import cut, parallel
from fathom.sync.transports.p2p.plan import Wanted, assign, pieces, team

WORKED = [
    ((4, 2, 3), {0: {0: [0]}, 1: {1: [0, 1]}, 2: {2: [0, 1]}, 3: {0: [1]}}),
    ((8, 2, 16), {source: {source: [0, 1], source + 8: [0, 1]} for source in range(8)}),
]
"""(sources, engines, engine ranks), source -> {engine rank: [engines]}: `algorithms.md` G.2."""


@pytest.mark.parametrize(("sizes", "expected"), WORKED)
def test_sources_are_paired_as_in_the_worked_examples(sizes, expected):
    found: dict[int, dict[int, list[int]]] = {}
    for (engine, rank), source in assign(*sizes).items():
        found.setdefault(source, {}).setdefault(rank, []).append(engine)
    assert found == expected


fleets = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))


@given(fleets)
def test_every_target_has_one_source_and_no_source_idles_while_another_has_two(fleet):
    sources, engines, ranks = fleet
    assigned = assign(sources, engines, ranks)
    assert set(assigned) == {(engine, rank) for engine in range(engines) for rank in range(ranks)}
    loads = Counter(assigned.values())
    assert len(loads) == min(sources, engines * ranks)


@given(fleets)
def test_teams_begin_with_the_assigned_source_and_share_out_those_that_no_target_needs(fleet):
    sources, engines, ranks = fleet
    assigned = assign(sources, engines, ranks)
    teams = {target: team(sources, engines, ranks, *target) for target in assigned}
    assert all(members[0] == assigned[target] for target, members in teams.items())
    if sources >= engines * ranks:
        everyone = [source for members in teams.values() for source in members]
        assert sorted(everyone) == list(range(sources))


def covered(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is covered."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[box.slices] += 1
    return count


@st.composite
def models(draw):
    """Shapes, a source layout and an engine layout."""
    shapes = {f"t{i}": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)) for i in range(3)}

    def layout(ranks: int):
        dims = {name: draw(st.integers(0, len(shape) - 1)) for name, shape in shapes.items() if draw(st.booleans())}
        whole = [name for name in shapes if name not in dims]
        some = st.frozensets(st.integers(0, ranks - 1), min_size=1)
        return parallel(shapes, ranks, dims, {name: draw(some) for name in whole if draw(st.booleans())})

    return shapes, layout(draw(st.integers(1, 4))), layout(draw(st.integers(1, 4)))


@given(models(), st.integers(1, 3), st.sampled_from([8, 64, 1 << 20]))
def test_every_slice_is_covered_exactly_once_by_those_who_hold_it(model, engines, piece_bytes):
    shapes, sources, ranks = model
    for engine in range(engines):
        for rank, layout in enumerate(ranks):
            wanted = [Wanted(name=name, box=box, item_bytes=2) for name, box in layout.items()]
            preferred = team(len(sources), engines, len(ranks), engine, rank)
            plan = pieces(wanted, sources, preferred, piece_bytes)
            for name, box in layout.items():
                count = covered(shapes[name], [piece.box for piece in plan if piece.name == name])
                assert (count[box.slices] == 1).all()
                assert count.sum() == box.elements
            for piece in plan:
                assert piece.box.intersect(sources[piece.source][piece.name]) == piece.box
                assert piece.size_bytes == 2 * piece.box.elements <= piece_bytes


@given(st.integers(1, 6), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([16, 100, 1 << 20]))
def test_loads_of_sources_that_hold_everything_differ_by_one_piece_at_most(sources, lengths, piece_bytes):
    wanted = [Wanted(name=f"t{i}", box=Box.whole((length, 3)), item_bytes=4) for i, length in enumerate(lengths)]
    plan = pieces(wanted, [None] * sources, range(sources), piece_bytes)
    loads = Counter({source: 0 for source in range(sources)})
    for piece in plan:
        loads[piece.source] += piece.size_bytes
    assert max(loads.values()) - min(loads.values()) <= max(piece.size_bytes for piece in plan)
    assert loads.total() == sum(length * 12 for length in lengths)


def test_a_source_of_the_team_is_asked_where_it_can_and_another_where_it_cannot():
    holdings = [{"a": cut((4,), 0, part, 2)} for part in (0, 1, 0, 1)]
    plan = pieces([Wanted(name="a", box=Box.whole((4,)), item_bytes=1)], holdings, [2])
    assert {(piece.source, piece.box.bounds) for piece in plan} == {(2, ((0, 2),)), (3, ((2, 4),))}


def test_ranks_of_an_engine_receive_one_share_each():
    shapes = {f"t{i}": (8, 12) for i in range(5)}
    for rank in parallel(shapes, 4, {name: int(name[1]) % 2 for name in shapes}):
        wanted = [Wanted(name=name, box=box, item_bytes=4) for name, box in rank.items()]
        moved = sum(piece.size_bytes for piece in pieces(wanted, [None, None], [0]))
        assert moved * 4 == 5 * math.prod((8, 12)) * 4


def test_what_nobody_holds_is_refused_by_name():
    wanted = [Wanted(name="head", box=Box.whole((4, 2)), item_bytes=2)]
    with pytest.raises(PayloadError, match=r"\(\(2, 4\), \(0, 2\)\).*'head'"):
        pieces(wanted, [{"head": Box(((0, 2), (0, 2)))}], [0])


@given(st.integers(1, 20), st.integers(1, 6))
def test_cuts_are_even_and_make_the_whole(length, parts):
    boxes = [cut((2, length), 1, part, parts) for part in range(parts)]
    assert (covered((2, length), boxes) == 1).all()
    sizes = [box.shape[1] for box in boxes]
    assert max(sizes) - min(sizes) <= 1
