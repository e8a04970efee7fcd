"""What a prefix cache could have served at best, beside plain caches that are fed the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.ids import EngineId
from fathom.core.records.trajectory import TokenPayload, Trajectory
from fathom.evidence.report.prefix_bound import known_at_best
from synthetic import records
from synthetic.records import policy


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A call of the trace."""

    trajectory: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    engine: str = "e0"
    version: int = 0
    behind: int | None = None
    """Version of the KV of its last token. None: its own."""
    cached: int = 0


@dataclass
class PlainCache:
    """Beginnings of contexts, in whole pages, the newest `room` of them."""

    page: int
    room: int
    held: dict[tuple[int, ...], None] = field(default_factory=dict)

    def serve(self, call: Asked) -> int:
        most = (len(call.prompt) - 1) // self.page * self.page
        found = max((n for n in range(0, most + 1, self.page) if not n or call.prompt[:n] in self.held), default=0)
        context = call.prompt + call.answer
        for n in range(self.page, len(context) + 1, self.page):
            self.held.pop(context[:n], None)
            self.held[context[:n]] = None
        while len(self.held) > self.room:
            del self.held[next(iter(self.held))]
        return found


def recorded(calls: Sequence[Asked]) -> list[Trajectory]:
    """The record of each trajectory, whose calls are contexts of their own, one second each."""
    made: list[Trajectory] = []
    for member in sorted({call.trajectory for call in calls}):
        branches, first = [], min(place for place, call in enumerate(calls) if call.trajectory == member)
        versions: set[int] = set()
        for call in calls:
            if call.trajectory != member:
                continue
            behind = call.version if call.behind is None else call.behind
            numbers = np.full(len(call.answer), call.version)
            kv = np.full(len(call.answer), behind)
            versions |= {call.version, behind}
            branch = records.branch(len(call.prompt), numbers, kv, np.random.default_rng(0))
            turn = msgspec.structs.replace(
                branch.turns[0], engine=EngineId(call.engine), cached_tokens=call.cached, queue_s=0.0, generate_s=1.0
            )
            ids = np.array(call.prompt + call.answer, np.int32)
            branches.append(msgspec.structs.replace(branch, token_ids=ids, turns=(turn,)))
        whole = records.trajectory(member=member, started_s=float(first), ended_s=1e9)
        payload = TokenPayload(versions=tuple(map(policy, sorted(versions))), branches=tuple(branches))
        made.append(msgspec.structs.replace(whole, payload=payload))
    return made


def best(calls: Sequence[Asked]) -> int:
    return sum(known_at_best(recorded(calls)).values())


def served(calls: Sequence[Asked], *, page: int = 1, room: int = 10**9) -> list[Asked]:
    """The calls one after another, with what caches served that every update empties."""
    caches: dict[tuple[str, int], PlainCache] = {}
    return [
        replace(call, cached=caches.setdefault((call.engine, call.version), PlainCache(page, room)).serve(call))
        for call in calls
    ]


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
any_call = st.builds(
    Asked,
    trajectory=st.just(0),
    prompt=tokens,
    answer=tokens,
    engine=st.sampled_from(["e0", "e1"]),
    version=st.integers(0, 1),
)
traces = st.lists(any_call, min_size=1, max_size=25).map(
    lambda calls: [replace(call, trajectory=place) for place, call in enumerate(calls)]
)


@given(traces)
def test_a_cache_without_limits_reaches_it_one_call_after_another(calls: list[Asked]) -> None:
    done = served(calls)
    assert best(calls) == best(done) == sum(call.cached for call in done)


@given(traces, st.integers(1, 4), st.integers(0, 12))
def test_no_cache_does_better(calls: list[Asked], page: int, room: int) -> None:
    done = served(calls, page=page, room=room)
    assert best(calls) >= best(done) >= sum(call.cached for call in done)


@given(traces, st.data())
def test_a_cache_that_was_warmed_by_calls_of_no_record_does_no_better(calls: list[Asked], data: st.DataObject) -> None:
    done = served(calls)
    left = [call for call in done if data.draw(st.booleans())]
    assert all(
        known >= sum(call.cached for call in left if f"m{call.trajectory}" == name.rpartition("/")[2])
        for name, known in known_at_best(recorded(left)).items()
    )


def test_the_worked_conversation() -> None:
    """Calls (prompt, answer) of (1000, 200), (1350, 300), (1800, 100), (2000, 50): 4,750 of 6,150 tokens."""
    whole = tuple(range(2050))
    ends = [(1000, 1200), (1350, 1650), (1800, 1900), (2000, 2050)]
    calls = [Asked(trajectory=0, prompt=whole[:start], answer=whole[start:end]) for start, end in ends]
    assert best(calls) == 4750


def test_a_group_shares_its_question_but_for_the_first_and_its_last_token() -> None:
    calls = [Asked(trajectory=member, prompt=(1, 2, 3, 4), answer=(5 + member,)) for member in range(8)]
    assert best(calls) == 7 * 3


@given(st.permutations(range(4)))
def test_who_of_a_group_computed_its_question_is_seen_by_what_it_found(order: list[int]) -> None:
    """The engine's order is not always that in which the calls could begin."""
    found = [0, 2, 3, 3]  # of the question's four tokens: the second was served while the first was computed
    calls = [
        Asked(trajectory=place, prompt=(1, 2, 3, 4), answer=(5 + place,), cached=found[which])
        for place, which in enumerate(order)
    ]
    assert best(calls) == 3 * 3


def test_what_none_of_the_record_computed_was_known_to_all_who_found_it() -> None:
    calls = [Asked(trajectory=member, prompt=(1, 2, 3, 4), answer=(9,), cached=2) for member in range(3)]
    assert best(calls) == 2 + 3 + 3


def test_what_was_found_because_a_call_of_later_beginning_had_sampled_it_costs_that_call_nothing() -> None:
    found = Asked(trajectory=0, prompt=(1, 2, 3, 4), answer=(9,), cached=3)
    source = Asked(trajectory=1, prompt=(1, 2), answer=(3, 4))
    assert best([found, source]) == 3
    assert best([found, source, replace(found, trajectory=2, cached=0)]) == 3 + 3


@pytest.mark.parametrize("change", [{"engine": "e1"}, {"version": 1}])
def test_neither_another_engine_nor_another_version_knows_it(change: dict[str, str | int]) -> None:
    first = Asked(trajectory=0, prompt=(1, 2, 3), answer=(4,))
    assert best([first, replace(first, trajectory=1)]) == 2
    assert best([first, replace(first, trajectory=1, **change)]) == 0


def test_what_went_on_under_other_weights_is_known_to_nobody_but_its_beginning_is() -> None:
    """It began under version 0; its answer was sampled by 1 over KV of 0."""
    mixed = Asked(trajectory=0, prompt=(1, 2, 3), answer=(4, 5), version=1, behind=0)
    after = Asked(trajectory=1, prompt=(1, 2, 3, 4, 5, 6), answer=(7,))
    assert best([mixed, replace(after, version=1)]) == 0
    assert best([mixed, replace(after, version=0)]) == 3


def test_what_was_computed_again_under_new_weights_is_known_under_both() -> None:
    """Its answer began under version 0 and went on under 1, all of the context being computed again."""
    first = records.trajectory(prompt=3, versions=(0, 0, 1, 1), started_s=0.0)
    tokens = tuple(first.payload.branches[0].token_ids.tolist())
    for version, known in ((0, 3 + 2), (1, 3 + 4), (2, 0)):
        after = recorded([Asked(trajectory=9, prompt=(*tokens, 99), answer=(1,), engine="engine-0", version=version)])
        assert sum(known_at_best([first, *after]).values()) == known


def test_order_in_time_counts_and_not_that_of_the_history() -> None:
    short = Asked(trajectory=0, prompt=(1, 2), answer=(3, 4))
    late = Asked(trajectory=1, prompt=(1, 2, 3, 4), answer=(9,))
    assert sum(known_at_best(reversed(recorded([short, late]))).values()) == 3
    assert best([replace(late, trajectory=0), replace(short, trajectory=1)]) == 1


def test_a_call_that_sampled_nothing_counts_with_what_it_found() -> None:
    first = Asked(trajectory=0, prompt=(1, 2, 3), answer=(4,))
    assert best([first, Asked(trajectory=1, prompt=(1, 2, 3), answer=(), cached=2)]) == 2
    assert best([Asked(trajectory=0, prompt=(1, 2, 3), answer=()), replace(first, trajectory=1)]) == 0
