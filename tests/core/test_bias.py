"""Which bias a token was sampled with, from the turn to the row and across a wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_records import branch, trajectory, turn

from fathom.core.errors import RecordError
from fathom.core.records.bias import LogitBias, TokenBias, join_biases
from fathom.core.records.row import rows_of
from fathom.core.records.sampling import SamplingParams
from fathom.core.wire import pack, unpack

ONE, TWO = LogitBias(ids=(3,), values=(1.5,)), LogitBias(ids=(1, 7), values=(-100.0, 0.25))
BIASES = st.lists(st.sampled_from([None, None, ONE, TWO]), max_size=6)


def by_token(bias: TokenBias | None, count: int) -> list[LogitBias | None]:
    if bias is None:
        return [None] * count
    bias.check(count)
    return [None if index < 0 else bias.biases[index] for index in bias.which.tolist()]


@given(BIASES, st.data())
def test_a_subset_has_the_biases_of_its_tokens(biases: list[LogitBias | None], data: st.DataObject) -> None:
    whole = TokenBias.of(biases)
    assert (whole is None) == (not any(biases))
    assert by_token(whole, len(biases)) == biases
    if whole is not None:
        chosen = data.draw(st.lists(st.integers(0, len(biases) - 1)))
        part = whole.select(np.array(chosen, np.int64))
        assert by_token(part, len(chosen)) == [biases[index] for index in chosen]


@given(st.lists(BIASES, min_size=1, max_size=4))
def test_parts_end_to_end_have_the_biases_of_each(parts: list[list[LogitBias | None]]) -> None:
    joined = join_biases([TokenBias.of(part) for part in parts], [len(part) for part in parts])
    every = [bias for part in parts for bias in part]
    assert by_token(joined, len(every)) == every
    assert (joined is None) == (not any(every))


@given(BIASES.filter(any))
def test_entries_are_every_addition_once(biases: list[LogitBias | None]) -> None:
    whole = TokenBias.of(biases)
    assert whole is not None
    tokens, ids, values = whole.entries()
    assert (tokens.dtype, ids.dtype, values.dtype) == (np.int64, np.int64, np.float32)
    found = sorted(zip(tokens.tolist(), ids.tolist(), values.tolist(), strict=True))
    assert found == sorted(
        (token, each, value)
        for token, bias in enumerate(biases)
        if bias is not None
        for each, value in zip(bias.ids, bias.values, strict=True)
    )


def test_a_row_has_the_biases_of_its_turns() -> None:
    turns = (turn(2, 4, SamplingParams(logit_bias=TWO)), turn(5, 6))
    record = trajectory(branch(turns=turns))
    assert unpack(type(record), *pack(record)).payload.branches[0].turns[0].sampling.logit_bias == TWO
    [row] = rows_of(record)
    assert by_token(row.bias, 3) == [TWO, TWO, None]
    [plain] = rows_of(trajectory())
    assert plain.bias is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": (), "values": ()},
        {"ids": (1, 2), "values": (1.0,)},
        {"ids": (2, 1), "values": (1.0, 1.0)},
        {"ids": (1, 1), "values": (1.0, 1.0)},
        {"ids": (-1,), "values": (1.0,)},
        {"ids": (1,), "values": (100.5,)},
        {"ids": (1,), "values": (float("nan"),)},
    ],
)
def test_biases_that_no_engine_would_apply_as_written_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="logit bias"):
        LogitBias(**wrong)


@pytest.mark.parametrize(
    "which", [np.zeros(2, np.int32), np.zeros(3, np.int64), np.full(3, 1, np.int32), np.full(3, -2, np.int32)]
)
def test_biases_that_do_not_fit_their_tokens_are_refused(which: np.ndarray) -> None:
    with pytest.raises(RecordError, match="bias"):
        TokenBias(biases=(ONE,), which=which).check(3)
