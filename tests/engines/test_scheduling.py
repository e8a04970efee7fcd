"""What the scheduler makes of arrivals, limits and too few pages, with a scripted forward: exact to the last bit."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from turns import Turns

from fathom.core.manifest import Manifest
from fathom.core.ports.engine import Barrier, ScoreRequest
from fathom.core.records.sampling import FinishReason, InFlightMode, SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.messages import FailureKind, RequestFailure
from fathom.rollout.engines.embedded.server.decode.plain_loop import PlainLoop
from fathom.rollout.engines.embedded.server.decode.scripted_forward import (
    ScriptedForward,
    scripted_logits,
    scripted_routes,
)
from fathom.rollout.engines.embedded.server.job import Stream

SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(temperature=1.3, top_k=8, top_p=0.9)]
BASE = tuple(1 + index % 13 for index in range(40))


def turns(pages: int, page_tokens: int = 4, context: int = 40, slots: int = 4, step: int = 9) -> Turns:
    forward = ScriptedForward(pages=pages, page_tokens=page_tokens)
    return Turns(forward=forward, slots=slots, context=context, step=step, pages=pages, page_tokens=page_tokens)


def check(done: Generated) -> None:
    """Every token is what the plain loop draws from that context by that version, with KV as old as it says."""
    for index, (version, oldest) in enumerate(zip(done.policy_version, done.kv_version, strict=True)):
        plain = PlainLoop(lambda context: torch.from_numpy(scripted_logits(context, version, oldest)).unsqueeze(0))  # noqa: B023
        context = done.context[: len(done.request.prompt_ids) + index]
        assert plain.logprob(done.request, context, done.text[index], 0.0) == pytest.approx(done.logprobs[index])
    if done.request.want_routes and done.text:
        check_routes(done)


def check_routes(done: Generated) -> None:
    """Each input's routes are those of the forward that made the token after it; a prompt's may be a little older."""
    prompt = len(done.request.prompt_ids)
    inputs, positions = done.context[:-1], np.arange(len(done.context) - 1)
    newest = np.concatenate([np.full(prompt - 1, done.policy_version[0]), done.policy_version])
    oldest = np.concatenate([np.full(prompt - 1, done.kv_version[0]), done.policy_version])
    assert done.routes is not None
    expected = np.stack([scripted_routes(inputs, positions, int(n)) for n in range(done.policy_version.max() + 1)])
    same = (expected == done.routes).all(axis=(2, 3))
    assert same.any(axis=0).all()
    made_by = same.argmax(axis=0)
    assert np.all((oldest <= made_by) & (made_by <= newest))


ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 36),  # prompt tokens that it has in common with others
        st.integers(0, 3),  # and those that only few have
        st.integers(1, 24),
        st.sampled_from(SAMPLINGS),
        st.sampled_from([(), (2, 11, 17)]),
        st.integers(0, 2),
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    st.tuples(st.just("turn"), st.integers(1, 8)),
    st.tuples(st.just("commit"), st.sampled_from(list(InFlightMode))),
    st.tuples(st.just("abort"), st.integers(0, 7)),
)


def submit(common: int, new: int, priority: int = 0) -> tuple:
    return ("submit", common, 0, new, SAMPLINGS[0], (), priority, False, True)


@example(10, [submit(30, 9), submit(1, 24), ("turn", 9), ("commit", InFlightMode.CONTINUE), submit(30, 9)])
@example(10, [submit(12, 24), submit(12, 24), submit(12, 24), submit(12, 24), ("turn", 2)])
@settings(max_examples=150, deadline=None)
@given(st.integers(10, 24), st.lists(ACTIONS, min_size=3, max_size=24))
def test_every_token_is_the_plain_loops_and_nothing_starves(pages: int, actions: list[tuple]) -> None:
    loop = turns(pages)
    for name, *arguments in actions:
        if name == "submit":
            common, own, new, sampling, stop, priority, pinned, routes = arguments
            prompt = BASE[:common] + (30 + own,) * own
            version = loop.version(loop.live) if pinned else None
            loop.submit(prompt, new, sampling=sampling, stop=stop, priority=priority, pinned=version, routes=routes)
        else:
            getattr(loop, name)(*arguments)
    for done in loop.finish():
        check(done)
        if done.request.pinned is not None:
            assert set(done.policy_version) | set(done.kv_version) <= {done.request.pinned.number}
        if done.end.finish_reason is FinishReason.CONTEXT:
            assert len(done.context) == loop.context


def long_turns(slots: int = 8) -> Turns:
    return turns(pages=400, page_tokens=32, context=5000, slots=slots, step=256)


def computed(loop: Turns) -> int:
    assert isinstance(loop.forward, ScriptedForward)
    return loop.forward.computed


def test_a_group_of_eight_computes_its_prompt_once() -> None:
    for size in (512, 500, 12):
        loop = long_turns()
        prompt = tuple(1 + index % 61 for index in range(size))
        for _ in range(8):
            loop.submit(prompt, 4)
        group = loop.finish()
        # Each member computes the prompt's last token and all its own but the last.
        assert computed(loop) == size + 7 * 1 + 8 * 3
        assert sorted(done.end.cached_tokens for done in group) == [0] + [size - 1] * 7
        for done in group:
            check(done)


def test_a_session_of_ten_turns_computes_only_what_is_new() -> None:
    loop = long_turns()
    context, new = np.empty(0, np.int32), 0
    for turn in range(10):
        observed = np.array([1 + (index * 7 + turn) % 61 for index in range(371)], np.int32)
        loop.submit((*context.tolist(), *observed.tolist()), 29)
        (done,) = loop.finish()
        new += len(observed) + len(done.text)
        context = done.context
    assert len(context) == 4000
    assert computed(loop) < 1.05 * new
    check(done)


def test_branches_share_what_they_have_in_common() -> None:
    loop = long_turns()
    loop.submit(tuple(range(1, 60)) * 5, 10)
    (trunk,) = loop.finish()
    before = computed(loop)
    for branch in (61, 62, 63):
        loop.submit((*trunk.context.tolist(), branch), 1)
    branches = loop.finish()
    for done in branches:
        check(done)
    # The trunk's last token was sampled and never read; the first branch computes it for all of them.
    whole = len(trunk.context)
    assert [done.end.cached_tokens for done in branches] == [whole - 1, whole, whole]
    assert computed(loop) == before + 2 + 1 + 1


def test_what_begins_alike_waits_for_whoever_computes_it() -> None:
    loop = long_turns()
    common = tuple(1 + index % 61 for index in range(320))
    for own in range(4):
        loop.submit((*common, 50 + own, 9, own), 1)
    for done in loop.finish():
        check(done)
    assert computed(loop) == 320 + 4 * 3


def test_a_cached_prefix_ends_with_its_version() -> None:
    loop = long_turns()
    for _ in range(2):
        loop.submit(BASE, 2)
        (done,) = loop.finish()
        assert done.end.cached_tokens == 0
        loop.commit(InFlightMode.CONTINUE, number=1 + loop.live % 2)


def test_kv_of_two_versions_is_not_found_again() -> None:
    loop = turns(pages=40)
    loop.submit(BASE[:20], 19)
    loop.turn(4)
    version = loop.version(1)
    loop.submit(BASE[:2], 30, pinned=version)
    loop.commit(InFlightMode.CONTINUE)
    old, _ = loop.finish()
    assert set(old.kv_version) == {1}
    for pinned in (None, version):
        loop.submit(tuple(old.context[:38].tolist()), 2, pinned=pinned)
        (new,) = loop.finish()
        check(new)
        assert new.end.cached_tokens <= 2
        assert set(new.kv_version) == {1 if pinned else 2}


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    loop = turns(pages=80, context=160, step=9)
    running = loop.submit(BASE[:4], 40)
    loop.turn()
    loop.submit(tuple(1 + index % 61 for index in range(120)), 1)
    before = computed(loop)
    loop.turn(10)
    assert computed(loop) == before + 10 * 9, "steps are full"
    loop.abort(0)
    loop.finish()
    tokens = sum(len(running.get_nowait().token_ids) for _ in range(running.qsize()))
    assert tokens == 0, "read by finish"


def test_the_oldest_group_goes_first_and_the_newest_gives_way() -> None:
    loop = turns(pages=10)  # one sequence of 40 tokens fills them
    streams = {priority: loop.submit(BASE[:4], 30, priority=priority) for priority in (2, 1, 0)}
    ended: list[int] = []
    while len(ended) < 3:
        loop.turn()
        for priority, stream in streams.items():
            while not stream.empty():
                if stream.get_nowait().end is not None:
                    ended.append(priority)
    assert ended == [0, 1, 2]


def test_who_cannot_run_yet_takes_no_place_from_an_older_group() -> None:
    loop = turns(pages=10)
    loop.submit(BASE[:36], 3)
    later = [loop.submit((50 + own, *BASE[:11]), 1, priority=1) for own in range(5)]
    loop.turn()
    older = [loop.submit((40 + own, *BASE[:19]), 1, priority=0) for own in range(2)]
    while any(stream.empty() for stream in older):
        loop.turn()
        assert all(stream.empty() for stream in later)
    for done in loop.finish():
        check(done)


def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    loop = turns(pages=12)
    loop.submit(BASE[:24], 8)
    loop.turn(4)
    long = loop.submit(BASE[2:38], 1)
    for _ in range(8):
        loop.submit(BASE[5:9], 12, priority=1)
    long_ended = False
    while not long_ended:
        loop.turn()
        long_ended = not long.empty()
        assert long_ended or loop.decoder.unsent() in ([], [0]), "what came later has begun"
    for done in loop.finish()[2:]:
        check(done)


def test_memory_for_all_sequences_lets_all_of_them_run() -> None:
    loop = turns(pages=20, slots=2, step=80)
    streams = [loop.submit((token, *BASE[:36]), 3) for token in (50, 51)]
    loop.turn()
    assert not any(stream.empty() for stream in streams)
    for done in loop.finish():
        check(done)


def test_who_gave_way_keeps_its_tokens_and_says_who_computed_its_context_again() -> None:
    loop = turns(pages=10)
    loop.submit(BASE[:4], 34, priority=0)
    loop.submit(BASE[1:5], 30, priority=1)
    loop.turn(22)
    loop.commit(InFlightMode.CONTINUE)
    first, second = loop.finish()
    for done in (first, second):
        check(done)
        assert done.end.finish_reason is FinishReason.LENGTH
    assert set(first.kv_version) == {1}
    assert second.kv_version[0] == 1
    assert second.kv_version[-1] == 2
    assert np.all(np.diff(second.policy_version) >= 0)


def test_an_abort_of_one_that_gave_way_returns_its_tokens() -> None:
    loop = turns(pages=10)
    loop.submit(BASE[:4], 34, priority=0)
    loop.submit(BASE[1:5], 30, priority=1)
    loop.turn(25)
    loop.abort(1)
    first, second = loop.finish()
    assert second.end.finish_reason is FinishReason.ABORTED
    assert 0 < len(second.text) < 30
    check(second)
    check(first)


def test_a_barrier_with_too_few_pages_repeats_to_the_bit() -> None:
    def run(loop: Turns, name: str, order: list[int]) -> list[Generated]:
        barrier = Barrier(name=name, size=6)
        for member in order:
            prompt = BASE[: 9 + member % 2]
            loop.submit(prompt, 20, barrier=barrier, name=f"{name}/{member}", seed=member, priority=member % 3)
        return sorted(loop.finish(), key=lambda done: done.request.request_id)

    loop = turns(pages=12)
    one = run(loop, "a", [0, 1, 2, 3, 4, 5])
    loop.submit(BASE[:30], 9)
    loop.finish()
    other = run(loop, "b", [4, 1, 5, 0, 3, 2])
    for left, right in zip(one, other, strict=True):
        assert left.text == right.text
        assert left.end.cached_tokens == right.end.cached_tokens
        assert left.logprobs.tobytes() == right.logprobs.tobytes()


def test_memory_for_less_than_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold one sequence of 40 tokens"):
        turns(pages=9)
    with pytest.raises(ValueError, match="leave no room for prompts beside 9 slots"):
        turns(pages=10, slots=9, step=9)


def test_a_stream_that_nobody_reads_frees_its_pages() -> None:
    loop = turns(pages=10)
    stream: asyncio.Queue = loop.submit(BASE[:4], 30)
    loop.turn(3)
    loop.scheduler.abandon(stream)
    loop.finish()
    loop.decoder.check()


def test_a_version_that_was_staged_and_never_committed_cannot_be_pinned():
    loop = turns(20)
    for version in (2, 3):  # pinned requests leave more sets of weights than one that serves and one that is staged
        loop.submit(BASE[:4], 2, pinned=loop.version(version - 1))
        loop.commit(InFlightMode.CONTINUE)
    loop.submit(BASE[:4], 2, pinned=loop.version(3))
    loop.finish()
    for number in (4, 5):  # staged, with whatever bytes came, and replaced before anybody looked at them
        staged = loop.scheduler.take_staging()
        loop.scheduler.received(staged, Manifest(version=loop.version(number), parent=None, tensors=()))
    loop.scheduler.take_staging()
    for number in (4, 5):
        stream = loop.submit(BASE[:4], 2, pinned=loop.version(number))
        loop.turn(4)
        refused = stream.get_nowait()
        assert isinstance(refused, RequestFailure)
        assert "does not hold" in refused.failure.reason


@pytest.mark.parametrize(
    "kept",
    [
        KeptSets(offsets=np.array([0, 2, 4], np.int64), ids=np.array([2, 5, 4, 5], np.int32)),
        KeptSets(offsets=np.array([0, 3, 2], np.int64), ids=np.array([2, 3], np.int32)),
        KeptSets(offsets=np.array([0, 1, 9], np.int64), ids=np.array([2, 3], np.int32)),
    ],
)
def test_a_scoring_that_contradicts_itself_is_refused_and_the_engine_goes_on(kept: KeptSets):
    loop = turns(20)
    stream: Stream = asyncio.Queue()
    request = ScoreRequest(
        request_id="s",
        token_ids=np.array([1, 2, 3], np.int32),
        positions=np.array([1, 2], np.int64),
        temperature=np.ones(2, np.float32),
        kept=kept,
        bias=None,
    )
    loop.scheduler.submit([request], stream)
    loop.turn(2)
    refused = stream.get_nowait()
    assert isinstance(refused, RequestFailure)
    assert refused.failure.kind is FailureKind.REFUSED
    assert "kept set" in refused.failure.reason


def test_members_of_a_barrier_that_never_filled_are_forgotten():
    loop = turns(20)
    gone = weakref.ref(loop.submit(BASE[:4], 2, barrier=Barrier(name="a", size=2)))
    kept = weakref.ref(loop.submit(BASE[:4], 2, barrier=Barrier(name="b", size=2)))
    loop.abort(0)
    loop.turn()
    loop.streams.clear()
    loop.submit(BASE[:4], 2, barrier=Barrier(name="c", size=1))
    loop.turn(8)
    loop.streams.clear()
    gc.collect()
    assert gone() is None
    assert kept() is not None
    loop.submit(BASE[:4], 2, barrier=Barrier(name="b", size=2))
    [late] = loop.finish()
    assert len(late.text) == 2
