from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rows import make_row

from fathom.model.kernels.cpu_attention import PAGE_TOKENS
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.prefixes import PrefixOrder, segments_of
from fathom.trainer.loop.packing import micro_batches, mini_batches

_SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 6)), max_size=24)
"""(prompt, sampled, trajectory) of each row."""


def _sizes(rows):
    return [len(row.token_ids) for row in rows], [row.trajectory for row in rows]


def _rows(shapes):
    rng = np.random.default_rng(0)
    return [make_row(rng, f"t{t}", prompt=p, sampled=s, branch=i) for i, (p, s, t) in enumerate(shapes)]


@given(_SHAPES, st.integers(1, 80))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(shapes, budget):
    rows = _rows(shapes)
    batches = micro_batches(*_sizes(rows), budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or sum(len(rows[index].token_ids) for index in batch) <= budget


@given(_SHAPES, st.integers(1, 80))
def test_rows_of_a_trajectory_stay_together_where_they_fit(shapes, budget):
    rows = _rows(shapes)
    home = {index: number for number, batch in enumerate(micro_batches(*_sizes(rows), budget)) for index in batch}
    for trajectory in {row.trajectory for row in rows}:
        own = [index for index, row in enumerate(rows) if row.trajectory == trajectory]
        if sum(len(rows[index].token_ids) for index in own) <= budget:
            assert len({home[index] for index in own}) == 1


@given(_SHAPES, st.integers(1, 5))
def test_mini_batches_keep_trajectories_whole_and_balance_tokens(shapes, parts):
    rows = _rows(shapes)
    batches = mini_batches(*_sizes(rows), parts)
    assert len(batches) == parts
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for trajectory in {row.trajectory for row in rows}:
        assert sum(any(rows[index].trajectory == trajectory for index in batch) for batch in batches) == 1
    sizes = [sum(len(rows[index].token_ids) for index in batch) for batch in batches]
    trajectories = {row.trajectory for row in rows}
    largest = max((sum(len(r.token_ids) for r in rows if r.trajectory == t) for t in trajectories), default=0)
    assert max(sizes) - min(sizes) <= largest


def _with_prefixes(tree):
    """Rows that begin like an earlier one for some pages: (which, pages, own tokens, trajectory) of each."""
    rng, ids = np.random.default_rng(0), []
    for number, (parent, pages, own, _) in enumerate(tree):
        begin = ids[parent % number][: pages * PAGE_TOKENS] if number else np.zeros(0, np.int64)
        ids.append(np.concatenate([begin, rng.integers(0, 1000, own)]))
    return ids, [trajectory for *_, trajectory in tree]


_TREES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 90), st.integers(0, 9)), min_size=1, max_size=16
)


@settings(deadline=None)
@given(_TREES, st.integers(1, 400))
def test_with_prefixes_the_tokens_that_are_computed_are_within_the_budget(tree, budget):
    rows, owners = _with_prefixes(tree)
    batches = micro_batches([len(row) for row in rows], owners, budget, PrefixOrder.of(rows))
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    home = {index: number for number, batch in enumerate(batches) for index in batch}
    for batch in batches:
        assert len(batch) == 1 or _computed([rows[index] for index in batch]) <= budget
    for owner in set(owners):
        own = [index for index, each in enumerate(owners) if each == owner]
        if _computed([rows[index] for index in own]) <= budget:
            assert len({home[index] for index in own}) == 1


def _computed(rows):
    segments = segments_of(np.concatenate(rows), [len(row) for row in rows])
    return sum(map(len, rows)) if segments is None else len(segments.tokens)


def test_rows_with_a_common_prefix_go_together():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 200) for _ in range(6)]
    rows = [np.concatenate([prompt, rng.integers(0, 1000, own)]) for own in (5, 40, 90, 300) for prompt in prompts]
    batches = micro_batches([len(row) for row in rows], range(len(rows)), 700, PrefixOrder.of(rows))
    groups = sorted(sorted(index % 6 for index in batch) for batch in batches)
    assert groups == [[group] * 4 for group in range(6)]


def _first_fit(lengths, budget):
    loads = []
    for length in lengths:
        place = next((i for i, load in enumerate(loads) if load + length <= budget), None)
        if place is None:
            loads.append(length)
        else:
            loads[place] += length
    return loads


@pytest.mark.parametrize("seed", range(12))
def test_lengths_with_a_long_tail_fill_micro_batches_evenly(seed):
    """Tokens over the number of micro-batches times the longest of them; first fit stays below the bound."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(250), 1.0, 96).astype(int) + 1, 2048).tolist()
    loads = [sum(lengths[index] for index in batch) for batch in micro_batches(lengths, range(96), 4096)]
    plain = _first_fit(lengths, 4096)
    assert sum(loads) == sum(plain)
    assert max(loads) <= 4096
    assert len(loads) == -(-sum(lengths) // 4096)
    assert len(loads) <= len(plain)
    assert sum(loads) / (len(loads) * max(loads)) >= 0.95


def test_micro_batches_of_equal_rows_fill_the_budget():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, f"t{i}", prompt=5, sampled=5) for i in range(8)]
    assert [len(batch) for batch in micro_batches(*_sizes(rows), 40)] == [4, 4]


def test_packed_rows_point_each_target_at_the_token_before_it():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, "a", prompt=3, sampled=2, kept=True), make_row(rng, "b", prompt=1, sampled=4)]
    packed = PackedRows.of_rows(rows)
    assert packed.lengths == (4, 4)
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.sources.tolist() == [2, 3, 4, 5, 6, 7]
    assert packed.targets.tolist() == [*rows[0].token_ids[3:], *rows[1].token_ids[1:]]
    assert packed.kept is not None
    assert packed.kept.of(1).tolist() == rows[0].kept.of(1).tolist()
    assert packed.kept.of(2) is None
    assert [len(part) for part in packed.split(packed.temperature)] == [2, 4]


def test_packing_no_rows_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        PackedRows.of_rows([])
