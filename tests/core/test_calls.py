"""Calls of a record, each once, and how much of a prompt an earlier one had computed."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.core.ids import EngineId
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.trajectory import TokenBranch, TokenPayload, Turn
from synthetic.records import policy


def branch(
    turns: list[tuple[int, int]],
    parent: int | None = None,
    shared: int = 0,
) -> TokenBranch:
    """Turns as (start, end)."""
    total = turns[-1][1]
    sampled = np.zeros(total, bool)
    for start, end in turns:
        sampled[start:end] = True
    count = int(sampled.sum())
    loss = sampled.copy()
    loss[:shared] = False
    return TokenBranch(
        parent=parent,
        shared_prefix=shared,
        token_ids=np.zeros(total, np.int32),
        sampled=sampled,
        loss_mask=loss,
        logprobs=np.zeros(count, np.float32),
        policy_version=np.zeros(count, np.int32),
        kv_version=np.zeros(count, np.int32),
        turns=tuple(
            Turn(
                start=start,
                end=end,
                engine=EngineId("e"),
                dtype="float32",
                kernels="k",
                sampling=SamplingParams(),
                finish_reason=FinishReason.STOP,
                prompt_hash="",
                cached_tokens=0,
                drafted_tokens=0,
                accepted_tokens=0,
                queue_s=0.0,
                generate_s=0.0,
            )
            for start, end in turns
        ),
    )


def test_the_bound_of_a_conversation_is_the_worked_one() -> None:
    """Calls (prompt, completion) of (1000, 200), (1350, 300), (1800, 100), (2000, 50): 4,750 of 6,150 tokens."""
    turns = [(1000, 1200), (1350, 1650), (1800, 1900), (2000, 2050)]
    calls = TokenPayload(versions=(policy(0),), branches=(branch(turns),)).calls
    assert [call.known_tokens for call in calls] == [0, 1200, 1650, 1900]
    sent = sum(call.turn.start for call in calls)
    assert sum(call.known_tokens for call in calls) / sent == pytest.approx(0.772357723577)


def test_a_call_of_two_branches_is_one_and_a_branch_knows_what_it_shares() -> None:
    branches = (
        branch([(4, 6), (8, 9)]),
        branch([(4, 6), (10, 12)], parent=0, shared=6),  # went on from the first turn in another way
        branch([(4, 7)], parent=0, shared=4),  # the same prompt, asked again
        branch([(5, 7)]),  # another conversation
    )
    calls = TokenPayload(versions=(policy(0),), branches=branches).calls
    assert [(call.turn.start, call.known_tokens) for call in calls] == [(4, 0), (8, 6), (10, 6), (4, 4), (5, 0)]


def test_nothing_asked_is_no_call() -> None:
    assert TokenPayload(versions=(), branches=()).calls == ()
