"""The books: legal moves, illegal moves, and how little a snapshot holds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from fathom.buffer.books import Books, BooksState
from fathom.core.errors import BooksError
from fathom.core.ids import GroupId, Occurrence, TrajectoryId
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import MaskReason

FIRST, SECOND, THIRD = (Occurrence(epoch=0, index=i) for i in range(3))
G, A, B = GroupId("g"), TrajectoryId("a"), TrajectoryId("b")


def buffered(tokens: int = 3) -> Books:
    books = Books()
    books.start(FIRST, G, [A])
    books.record(A, tokens)
    books.buffer(A)
    return books


ILLEGAL: dict[str, tuple[Callable[[Books], object], str]] = {
    "train what is in flight": (lambda b: (b.start(SECOND, G, [B]), b.train(B, 0, {})), "train b: it must be buffered"),
    "train more than was sampled": (lambda b: b.train(A, 4, {}), "a sampled 3 tokens, but 4 in the gradient"),
    "train less than was sampled": (lambda b: b.train(A, 1, {MaskReason.VETO: 1}), "sampled 3 tokens"),
    "train twice": (lambda b: (b.train(A, 3, {}), b.train(A, 3, {})), "is unknown or ended"),
    "record twice": (lambda b: (b.start(SECOND, G, [B]), b.record(B, 1), b.record(B, 1)), "b ended twice"),
    "buffer without an end": (lambda b: (b.start(SECOND, G, [B]), b.buffer(B)), "its end was not recorded"),
    "end what ended": (
        lambda b: (b.train(A, 3, {}), b.end(A, AttemptState.DROPPED, Fate.AGE)),
        "not in flight or buffered",
    ),
    "end for a foreign reason": (lambda b: b.end(A, AttemptState.FILTERED, Fate.AGE), "filtered for the reason age"),
    "end as trained": (lambda b: b.end(A, AttemptState.TRAINED, Fate.AGE), "cannot become trained"),
    "close with live attempts": (lambda b: b.close(FIRST, None), "has 1 attempts in flight or buffered"),
    "close twice": (lambda b: (b.train(A, 3, {}), b.close(FIRST, None), b.close(FIRST, None)), "is not open"),
    "two attempts at once": (lambda b: b.start(FIRST, G, [B]), "has an attempt in flight or buffered"),
    "the same trajectory again": (lambda b: b.start(SECOND, G, [A]), r"known already \['a'\]"),
    "leave a gap": (lambda b: b.start(THIRD, G, [B]), "leaves a gap after e0.i0"),
    "run a closed occurrence": (
        lambda b: (b.train(A, 3, {}), b.close(FIRST, None), b.start(FIRST, G, [B])),
        "e0.i0 is closed",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_moves_are_named(case: str) -> None:
    move, words = ILLEGAL[case]
    with pytest.raises(BooksError, match=words):
        move(buffered())


def test_every_token_and_attempt_is_somewhere() -> None:
    books = buffered()
    books.check()
    books.train(A, 2, {MaskReason.POPPED: 1})
    books.close(FIRST, None)
    books.start(SECOND, G, [B])
    books.record(B, 5)
    books.end(B, AttemptState.DROPPED, Fate.REQUEUED)
    assert books.requeue(SECOND) == 1
    books.check()
    state = books.snapshot()
    assert (state.recorded_tokens, state.gradient_tokens) == (8, 2)
    assert state.masked_tokens == {MaskReason.POPPED: 1, MaskReason.NOT_TRAINED: 5}
    assert (state.opened, state.trained, books.idle()) == (2, 1, [SECOND])


def test_a_forged_balance_is_refused() -> None:
    state = buffered().snapshot()
    for forged in ({"recorded_tokens": 4}, {"started": 2}, {"opened": 2}, {"live": (), "started": 0}):
        with pytest.raises(BooksError):
            Books().restore(msgspec.structs.replace(state, **forged))


def test_a_snapshot_survives_the_disk_and_does_not_grow_with_history() -> None:
    books, sizes = Books(), []
    for index in range(2000):
        name = TrajectoryId(f"t{index}")
        books.start(Occurrence(epoch=index // 100, index=index % 100), G, [name])
        books.record(name, 1)
        books.buffer(name)
        books.train(name, 1, {})
        books.close(Occurrence(epoch=index // 100, index=index % 100), None)
        if index in (999, 1999):
            sizes.append(len(msgspec.msgpack.encode(books.snapshot())))
    assert sizes[1] <= sizes[0] + 16
    again = Books()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(books.snapshot()), type=BooksState))
    assert again.snapshot() == books.snapshot()
    with pytest.raises(BooksError, match="is closed"):
        again.start(Occurrence(epoch=3, index=7), G, [A])
