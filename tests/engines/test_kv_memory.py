"""Pages: none is lost, none is counted twice, and what is found in the cache is what was put there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.core.errors import ConfigError
from fathom.model.language_model import ModelShape
from fathom.model.paged_attention import PAGE_TOKENS
from fathom.rollout.engines.embedded.server.kv.kv_budget import kv_pages
from fathom.rollout.engines.embedded.server.kv.kv_memory import KvMemory
from fathom.rollout.engines.embedded.server.kv.page_pool import PageLeakError, PagePool

PAGE, LONGEST = 4, 24


class Written:
    """A KV memory and the tokens that lie in its pages."""

    def __init__(self, pages: int, slots: int = 4) -> None:
        self.tokens = np.full((pages, PAGE), -1)
        self.memory = KvMemory(slots=slots, max_tokens=LONGEST, pages=pages, page_tokens=PAGE, copy_page=self.copy)
        self.running: dict[int, tuple[str, np.ndarray]] = {}

    def copy(self, from_page: int, to_page: int) -> None:
        self.tokens[to_page] = self.tokens[from_page]

    def begin(self, slot: int, root: str, tokens: np.ndarray) -> int | None:
        """Returns how many tokens were there already: they are the right ones."""
        there = self.memory.begin(slot, len(tokens), self.memory.find(root, tokens[:-1]), spare=0)
        if there is None:
            return None
        assert self.held(slot)[:there].tolist() == tokens[:there].tolist()
        table = self.memory.tables(np.array([slot]))[0]
        for at in range(there, len(tokens)):
            self.tokens[table[at // PAGE], at % PAGE] = tokens[at]
        self.running[slot] = root, tokens
        return there

    def held(self, slot: int) -> np.ndarray:
        table = self.memory.tables(np.array([slot]))[0]
        return self.tokens[table[: self.memory.held[slot]]].ravel()

    def remember(self, slot: int, upto: int) -> None:
        root, tokens = self.running[slot]
        self.memory.remember(slot, root, tokens[: max(1, upto % (len(tokens) + 1))])

    def end(self, slot: int) -> None:
        root, tokens = self.running.pop(slot)
        self.memory.remember(slot, root, tokens)
        self.memory.release(slot)

    def check(self) -> None:
        self.memory.check()
        for slot, (_, tokens) in self.running.items():
            assert self.held(slot)[: len(tokens)].tolist() == tokens.tolist()


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST).map(lambda ids: np.array(ids, np.int32))
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.sampled_from("ab"), SEQUENCES),
    st.tuples(st.just("remember"), st.integers(0, 3), st.integers(1, LONGEST)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(6, 20), st.lists(OPERATIONS, max_size=40))
def test_pages_add_up_and_hold_what_they_say(pages: int, operations: list[tuple]) -> None:
    written = Written(pages)
    for name, *arguments in operations:
        if name == "clear":
            written.memory.clear()
        elif (name == "begin") is (arguments[0] not in written.running):
            getattr(written, name)(*arguments)
        written.check()
    for slot in list(written.running):
        written.end(slot)
    written.memory.check()
    assert written.memory.available == pages


@settings(max_examples=200, deadline=None)
@given(st.lists(SEQUENCES, max_size=12), SEQUENCES)
def test_the_longest_beginning_that_was_computed_is_found(computed: list[np.ndarray], asked: np.ndarray) -> None:
    written = Written(pages=400)
    for tokens in computed:
        written.begin(0, "a", tokens)
        written.end(0)
    longest = max((shared(tokens, asked[:-1]) for tokens in computed), default=0)
    assert written.begin(1, "a", asked) == longest
    assert written.begin(2, "b", asked) == 0


def shared(one: np.ndarray, other: np.ndarray) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_what_was_used_longest_ago_makes_room() -> None:
    written = Written(pages=9)
    first, second, third = (np.array([number] * 12, np.int32) for number in (1, 2, 3))
    for tokens in (first, second, third):
        assert written.begin(0, "a", tokens) == 0
        written.end(0)
    assert written.begin(0, "a", first) == 11
    written.end(0)
    assert written.begin(0, "a", np.array([4] * 12, np.int32)) == 0  # in the place of the second
    written.end(0)
    found = [written.memory.find("a", tokens).tokens(PAGE) for tokens in (first, second, third)]
    assert found == [12, 0, 12]


def test_a_page_that_somebody_reads_is_not_given_away() -> None:
    written = Written(pages=6)
    tokens = np.array([1] * 20, np.int32)
    assert written.begin(0, "a", tokens) == 0
    written.remember(0, 20)
    assert written.begin(1, "a", np.array([2] * 8, np.int32)) is None
    assert written.begin(1, "a", np.array([2] * 4, np.int32)) == 0
    assert not written.memory.grow(0)
    written.check()


def test_what_two_computed_at_the_same_time_is_held_once() -> None:
    written = Written(pages=9)
    short, long = np.array([1] * 8, np.int32), np.array([1] * 12, np.int32)
    assert [written.begin(0, "a", short), written.begin(1, "a", long)] == [0, 0]
    written.remember(0, 8)
    written.remember(1, 12)
    written.check()
    written.end(0)
    assert written.memory.available == 6
    assert written.begin(2, "a", np.array([2] * LONGEST, np.int32)) == 0
    written.check()


def test_a_leak_is_found() -> None:
    pool = PagePool(4)
    lost = pool.take(2)
    pool.check(held=lost, cached=[])
    with pytest.raises(PageLeakError, match="1 of 4 are wrong"):
        pool.check(held=lost[:1], cached=[])
    with pytest.raises(PageLeakError, match="do not add up"):
        pool.check(held=lost, cached=[lost[0]])


SHAPE = ModelShape(vocab_size=9, layers=2, kv_heads=4, head_dim=16, value_head_dim=8, max_positions=99999, experts=None)
PAGE_BYTES = 2 * 4 * (16 + 8) * 4 * PAGE_TOKENS


def test_memory_is_what_the_option_says_and_enough_for_one_sequence() -> None:
    assert kv_pages(1, SHAPE, torch.float32, 8, 64) == 2**20 // PAGE_BYTES
    assert kv_pages(None, SHAPE, torch.float32, 8, 65) == 8 * 3
    assert kv_pages(None, SHAPE, torch.float32, 10**6, 65) == 2**32 // PAGE_BYTES
    least = -(-64 * PAGE_BYTES // 2**20)
    with pytest.raises(ConfigError, match=f"set at least {least}"):
        kv_pages(1, SHAPE, torch.float32, 8, 64 * PAGE_TOKENS)
    assert kv_pages(least, SHAPE, torch.float32, 8, 64 * PAGE_TOKENS) >= 64
