"""What engines remember of requests that were sent: enough to refuse one that comes twice, and no more."""

from __future__ import annotations

from fathom.rollout.engines.seen_requests import KEPT, SeenRequests


def test_the_newest_requests_are_remembered_and_no_more() -> None:
    seen = SeenRequests()
    for number in range(KEPT + 3):
        seen.add(str(number))
    assert len(seen) == KEPT
    assert [name in seen for name in ("2", "3", str(KEPT + 2), "never")] == [False, True, True, False]


def test_one_that_is_added_twice_is_one() -> None:
    seen = SeenRequests()
    seen.add("a")
    seen.add("a")
    assert len(seen) == 1


def test_what_was_refused_after_all_may_be_sent_again():
    seen = SeenRequests()
    seen.add("a")
    seen.discard("a")
    seen.discard("never sent")
    assert "a" not in seen
    assert len(seen) == 0
