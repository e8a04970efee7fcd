"""Rows of ATIF documents: made of the ids alone, by the prefix rule, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import DataError
from fathom.text.atif.document import Agent, Document, Metrics, Step
from fathom.text.atif.rows import demonstrations_of

Turns = list[tuple[list[int], list[int]]]


def agent_step(
    place: int, prompt: list[int] | None, completion: list[int] | None, *, copied: bool = False, calls: int | None = 1
) -> Step:
    return Step(
        step_id=place,
        source="agent",
        message="",
        metrics=None if prompt is None else Metrics(prompt_token_ids=prompt, completion_token_ids=completion),
        is_copied_context=copied or None,
        llm_call_count=calls,
    )


def document(steps: list[Step], subagents: list[Document] | None = None, name: str | None = None) -> Document:
    return Document(
        schema_version="ATIF-v1.8",
        trajectory_id=name,
        agent=Agent(name="a", version="1"),
        steps=steps,
        subagent_trajectories=subagents,
    )


def calls(*turns: tuple[list[int], list[int]]) -> Document:
    return document([agent_step(place, *turn) for place, turn in enumerate(turns, 1)])


def test_the_worked_row() -> None:
    """Turns [1 2 3] -> [7 8 9] and [1 2 3 7 8 9 10 4 5] -> [6]."""
    (row,) = demonstrations_of(calls(([1, 2, 3], [7, 8, 9]), ([1, 2, 3, 7, 8, 9, 10, 4, 5], [6])), "it")
    assert row.token_ids.tolist() == [1, 2, 3, 7, 8, 9, 10, 4, 5, 6]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 3 + [True]
    assert row.source == "it"


def test_what_was_tokenised_anew_is_refused() -> None:
    with pytest.raises(DataError, match=r"prompt of step 2 does not go on .* until step 1 \(it differs at token 3\)"):
        demonstrations_of(calls(([1, 2, 3], [7, 8, 9]), ([1, 2, 3, 78, 9, 10, 4, 5], [6])), "it")


def test_a_compacted_history_is_refused() -> None:
    with pytest.raises(DataError, match="it has only 2 tokens"):
        demonstrations_of(calls(([1, 2, 3], [7, 8]), ([1, 2], [6])), "it")


def test_copied_context_is_not_trained() -> None:
    steps = [
        agent_step(1, [9], [9], copied=True),  # of another conversation: it need not fit
        agent_step(2, [1, 2], [3], copied=True),
        agent_step(3, [1, 2, 3, 4], [5]),
        agent_step(4, [1, 2, 3, 4, 5, 6], [7], copied=True),
        agent_step(5, [1, 2, 3, 4, 5, 6, 7, 8], [9]),
    ]
    (row,) = demonstrations_of(document(steps), "it")
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert np.flatnonzero(row.loss_mask).tolist() == [4, 8]


def test_steps_without_a_model_are_left_out() -> None:
    steps = [Step(step_id=1, source="user", message="hi"), agent_step(2, None, None, calls=0), agent_step(3, [1], [2])]
    (row,) = demonstrations_of(document(steps), "it")
    assert row.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([Step(step_id=1, source="user", message="hi")], "no step of the agent is left"),
        ([agent_step(1, [1], [2], copied=True)], "no step of the agent is left"),
        ([agent_step(1, [1], [])], "no step of the agent is left"),
        ([agent_step(1, None, None, calls=None)], "step 1 of the agent has no token ids"),
        ([agent_step(1, [1], None)], "step 1 of the agent has no token ids"),
        ([agent_step(1, [], [2])], "step 1 has an empty prompt"),
        ([agent_step(1, [1], [2], calls=2)], "step 1 holds 2 calls"),
    ],
)
def test_what_makes_no_row_is_refused_by_name(steps: list[Step], words: str) -> None:
    with pytest.raises(DataError, match=words):
        demonstrations_of(document(steps), "some.json")


def test_sub_agents_make_rows_of_their_own() -> None:
    inner = document([agent_step(1, [5], [6])], name="inner")
    rows = demonstrations_of(document([agent_step(1, [1], [2])], [inner]), "it")
    assert [(row.token_ids.tolist(), row.source) for row in rows] == [([1, 2], "it"), ([5, 6], "it, sub-agent inner")]
    broken = document([agent_step(1, [1], None)], name="inner")
    with pytest.raises(DataError, match="it, sub-agent inner: step 1"):
        demonstrations_of(document([agent_step(1, [1], [2])], [broken]), "it")


ids = st.lists(st.integers(0, 9), max_size=4)


@given(parts=st.lists(st.tuples(ids, ids, st.booleans()), min_size=1, max_size=6))
def test_every_trained_token_has_the_context_that_it_was_sampled_in(
    parts: list[tuple[list[int], list[int], bool]],
) -> None:
    """Conversations that only grow: new tokens, an answer, and whether it is copied context."""
    steps: list[Step] = []
    history: list[int] = [0]
    trained: list[tuple[list[int], int]] = []
    for place, (new, answer, copied) in enumerate(parts, 1):
        prompt = history + new
        steps.append(agent_step(place, prompt, answer, copied=copied))
        history = prompt + answer
        trained += [] if copied else [(history[: len(prompt) + at], token) for at, token in enumerate(answer)]
    if not trained:
        with pytest.raises(DataError):
            demonstrations_of(document(steps), "it")
        return
    (row,) = demonstrations_of(document(steps), "it")
    found = [(row.token_ids[:at].tolist(), int(row.token_ids[at])) for at in np.flatnonzero(row.loss_mask)]
    assert found == trained


@given(turns=st.lists(st.tuples(ids, ids), min_size=2, max_size=4))
def test_a_row_is_never_made_across_a_break(turns: Turns) -> None:
    """Whatever the prompts are: either each goes on from all before it, or the document is refused."""
    fits = all(
        prompt[: len(before)] == before
        for before, prompt in zip([[*p, *c] for p, c in turns], [p for p, _ in turns[1:]], strict=False)
    )
    makes_a_row = fits and all(prompt for prompt, _ in turns) and any(answer for _, answer in turns)
    if makes_a_row:
        assert len(demonstrations_of(calls(*turns), "it")) == 1
    else:
        with pytest.raises(DataError):
            demonstrations_of(calls(*turns), "it")
