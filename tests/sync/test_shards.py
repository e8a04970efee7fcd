"""Boxes and the bytes they cover, against plain numpy indexing."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.sync.shards import Box, copies, span_boxes, uncovered

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape):
    bounds = []
    for size in shape:
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    return Box(tuple(bounds))


def elements(box: Box, shape) -> set[int]:
    return set(np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel().tolist())


shaped = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape)))


@settings(deadline=None)
@given(shaped)
def test_what_two_boxes_have_in_common_is_what_both_cover(drawn):
    shape, one, other = drawn
    common = one.intersect(other)
    assert (elements(common, shape) if common else set()) == elements(one, shape) & elements(other, shape)


@settings(deadline=None)
@given(shaped)
def test_runs_cover_the_box_in_its_own_order_and_never_touch(drawn):
    shape, box, _ = drawn
    runs = list(box.runs(Box.whole(shape)))
    covered = [element for first, count in runs for element in range(first, first + count)]
    assert covered == np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel().tolist()
    assert all(runs[i][0] + runs[i][1] < runs[i + 1][0] for i in range(len(runs) - 1))


@settings(deadline=None)
@given(shaped)
def test_copies_bring_what_is_common_from_one_shard_to_another(drawn):
    shape, source, into = drawn
    common = source.intersect(into)
    if common is None:
        return
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    sent = np.ascontiguousarray(whole[source.slices]).reshape(-1).view(np.uint8)
    got = np.full(into.shape, -1, dtype=np.int32)
    view = got.reshape(-1).view(np.uint8)
    for first, place, size in copies(common, source, into, 4):
        view[place : place + size] = sent[first : first + size]
    expected = np.where(np.isin(whole, whole[common.slices]), whole, -1)[into.slices]
    assert np.array_equal(got, expected)


@settings(deadline=None)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), *[st.integers(0, math.prod(s))] * 2)))
def test_a_span_of_elements_is_a_few_contiguous_boxes(drawn):
    shape, one, other = drawn
    first, end = min(one, other), max(one, other)
    boxes = span_boxes(shape, first, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    runs = [list(box.runs(Box.whole(shape))) for box in boxes]
    assert all(len(run) == 1 for run in runs)
    covered = [e for ((start, count),) in runs for e in range(start, start + count)]
    assert covered == list(range(first, end))


@settings(deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_of(shape), max_size=4))))
def test_a_gap_is_found_iff_there_is_one(drawn):
    shape, parts = drawn
    everything = elements(Box.whole(shape), shape)
    left = everything - set().union(*(elements(part, shape) for part in parts))
    gap = uncovered(Box.whole(shape), parts)
    assert (gap is None) == (not left)
    if gap is not None:
        assert elements(gap, shape)
        assert elements(gap, shape) <= left


def test_what_is_no_box_or_not_inside_is_refused():
    for bounds in [((2, 1),), ((-1, 1),)]:
        with pytest.raises(ValueError, match="no box"):
            Box(bounds)
    with pytest.raises(ValueError, match="does not lie within"):
        Box(((0, 3),)).within(Box(((1, 3),)))
