"""The order of the data, and where it goes on."""

from __future__ import annotations

import pytest

from fathom.buffer.books import Books
from fathom.buffer.source import OccurrenceSource
from fathom.core.errors import CheckpointError, DataError
from fathom.core.ids import GroupId, Occurrence, TrajectoryId


def source(*, num_tasks: int = 5, seed: int = 0, shuffle: bool = True, epochs: int | None = 2) -> OccurrenceSource:
    return OccurrenceSource(num_tasks=num_tasks, seed=seed, shuffle=shuffle, epochs=epochs)


def tasks(of: OccurrenceSource, count: int) -> list[int]:
    return [draw.task for _ in range(count) if (draw := of.next())]


def test_each_epoch_is_another_permutation_of_all_tasks() -> None:
    drawn = tasks(source(num_tasks=50), 100)
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == list(range(50))
    assert drawn[:50] != drawn[50:]
    assert drawn == tasks(source(num_tasks=50), 100)
    assert drawn != tasks(source(num_tasks=50, seed=1), 100)


def test_without_shuffling_it_is_the_order_of_the_data() -> None:
    assert tasks(source(shuffle=False), 10) == [0, 1, 2, 3, 4] * 2


def test_it_ends_exactly_after_its_epochs() -> None:
    finite = source()
    assert len(tasks(finite, 100)) == 10
    assert finite.exhausted
    finite.requeue(Occurrence(epoch=0, index=3))
    assert not finite.exhausted
    again = finite.next()
    assert again is not None
    assert again.task == tasks(source(), 4)[3]
    assert finite.next() is None


@pytest.mark.parametrize("opened", range(11))
def test_resumes_from_the_books_at_every_place(opened: int) -> None:
    whole, books = source(), Books()
    for _ in range(opened):
        draw = whole.next()
        assert draw is not None
        name = TrajectoryId(draw.occurrence.name)
        books.start(draw.occurrence, GroupId("g"), [name])
        books.record(name, 0)
        books.buffer(name)
        books.train(name, 0, {})
        books.close(draw.occurrence, None)
    resumed = source()
    resumed.resume(whole.snapshot(), books)
    assert tasks(resumed, 100) == tasks(whole, 100) == tasks(source(), 100)[opened:]


def test_other_data_are_refused() -> None:
    with pytest.raises(CheckpointError, match="the data changed since the checkpoint"):
        source(num_tasks=6).resume(source().snapshot(), Books())


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(DataError, match="no tasks to train on"):
        source(num_tasks=0)
