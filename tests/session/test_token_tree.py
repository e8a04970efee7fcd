"""The token tree: what was sent and sampled comes out again, and every turn is trained where it must be, once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_turns import turn

from fathom.core.errors import RecordError
from fathom.rollout.sampled import prompt_hash
from fathom.rollout.session.tree import TokenTree

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
MOVES = st.lists(st.tuples(st.integers(0, 99), IDS, IDS, st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)
"""Go on from which turn (or from nothing), with which prompt and answer, extending it or not, by which version."""


class Grown:
    """A tree grown by moves, beside a plain account of it: for each turn what was sent and what was sampled."""

    def __init__(self, moves) -> None:
        self.tree = TokenTree()
        self.sent: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.extended: set[int] = set()
        for which, prompt_ids, answer, extends, version in moves:
            places = [None, *self.sent]
            parent = places[which % len(places)]
            before = [] if parent is None else self.sent[parent] + self.answers[parent]
            prompt = self.tree.add_prompt(parent, np.array(prompt_ids, np.int32), ())
            assert self.tree.context(prompt).tolist() == before + prompt_ids
            if parent is not None and extends:
                self.tree.extend(parent)
                self.extended.add(parent)
            sent = before + prompt_ids
            place = self.tree.add_turn(prompt, turn(np.array(sent, np.int32), answer, version), None)
            self.sent[place], self.answers[place] = sent, answer


@given(moves=MOVES)
def test_each_trained_token_has_the_left_context_that_the_engine_was_sent(moves):
    grown = Grown(moves)
    for branch in grown.tree.payload().branches:
        for each in branch.turns:
            assert prompt_hash(branch.token_ids[: each.start]) == each.prompt_hash


@given(moves=MOVES)
def test_each_turn_that_counts_is_trained_in_exactly_one_branch_and_abandoned_ones_in_none(moves):
    grown = Grown(moves)
    trained: list[tuple[list[int], list[int]]] = []
    for branch in grown.tree.payload().branches:
        for each in branch.turns:
            mask = branch.loss_mask[each.start : each.end]
            assert mask.all() or not mask.any()
            if mask.all():
                trained.append(
                    (branch.token_ids[: each.start].tolist(), branch.token_ids[each.start : each.end].tolist())
                )
    counted = grown.extended | {grown.tree.end}
    assert sorted(trained) == sorted((grown.sent[place], grown.answers[place]) for place in counted)


@given(moves=MOVES, data=st.data())
def test_what_the_environment_rewards_is_trained_though_nobody_went_on_from_it(moves, data):
    grown = Grown(moves)
    rewarded = data.draw(st.sets(st.sampled_from(grown.tree.turns)))
    branches = grown.tree.payload(rewarded).branches
    counted = grown.extended | {grown.tree.end} | rewarded
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == sum(
        len(grown.answers[place]) for place in counted
    )


@given(moves=MOVES)
def test_every_sampled_token_is_counted_once(moves):
    grown = Grown(moves)
    assert grown.tree.payload().num_sampled == sum(map(len, grown.answers.values()))


def test_a_linear_conversation_is_one_branch():
    tree, context = TokenTree(), np.empty(0, np.int32)
    place = None
    for number in range(4):
        prompt = tree.add_prompt(place, np.array([number, 7], np.int32), ())
        if place is not None:
            tree.extend(place)
        context = tree.context(prompt)
        place = tree.add_turn(prompt, turn(context, [50 + number]), None)
    (branch,) = tree.payload().branches
    assert branch.token_ids.tolist() == [0, 7, 50, 1, 7, 51, 2, 7, 52, 3, 7, 53]
    assert branch.token_ids[branch.loss_mask].tolist() == [50, 51, 52, 53]


def test_a_prompt_that_got_no_answer_is_recorded_and_not_trained():
    tree = TokenTree()
    prompt = tree.add_prompt(None, np.array([1], np.int32), ())
    place = tree.add_turn(prompt, turn(np.array([1], np.int32), [2]), None)
    tree.extend(place)
    tree.add_prompt(place, np.array([3], np.int32), ())
    (branch,) = tree.payload().branches
    assert (branch.token_ids.tolist(), branch.loss_mask.tolist()) == ([1, 2, 3], [False, True, False])


def test_what_makes_no_sense_is_refused():
    tree = TokenTree()
    with pytest.raises(RecordError, match="nothing was asked"):
        tree.payload()
    with pytest.raises(RecordError, match="empty"):
        tree.add_prompt(None, np.empty(0, np.int32), ())
    prompt = tree.add_prompt(None, np.array([1], np.int32), ())
    with pytest.raises(RecordError, match="goes on from a turn"):
        tree.add_prompt(prompt, np.array([1], np.int32), ())
    place = tree.add_turn(prompt, turn(np.array([1], np.int32), [2]), None)
    with pytest.raises(RecordError, match="answers a prompt"):
        tree.add_turn(place, turn(np.array([1], np.int32), [2]), None)
