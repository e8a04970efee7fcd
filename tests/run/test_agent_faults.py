"""Faults of agents' episodes: each ends in time, its cause is told, none has a reward, and the others are unharmed."""

from __future__ import annotations

import asyncio
import os

import pytest
from agent_world import AgentWorld, causes
from small_runs import carriers, command_of, marked
from talks import TalkOptions, Talks

from fathom.core.records.row import rows_of
from fathom.core.records.trajectory import Graded, TrajectoryStatus, Ungraded
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import Pace, ScriptedEngine

_MARK = f"agent-faults-{os.getpid()}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Every process that is started for these tests carries a mark, and is gone after them."""
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in marked(_MARK).items():
            patch.setenv(name, value)
        made = AgentWorld(Talks(TalkOptions()), tmp_path_factory.mktemp("talks"))
        loop.run_until_complete(made.processes.start())
    yield lambda *faults, **given: loop.run_until_complete(made.play(*faults, **given))
    loop.run_until_complete(made.processes.close())
    loop.close()
    assert [command_of(pid) for pid in carriers(_MARK) if "resource_tracker" not in command_of(pid)] == []


def test_a_group_talks_and_every_turn_is_trained_in_the_context_it_was_sampled_in(world) -> None:
    engine = ScriptedEngine(ToyPolicy(54), max_context_tokens=200)
    group = world(*[""] * 4, engine=engine)
    assert causes(group) == {"graded": 4}
    sent = {request.request_id: request.prompt_ids.tolist() for request in engine.requests}
    for each in group:
        (row,) = rows_of(each)
        assert each.header.session is not None
        assert each.header.session.turns == 3
        assert each.header.session.acting == "ended"
        for number, turn in enumerate(each.payload.branches[0].turns):
            assert row.token_ids[: turn.start].tolist() == sent[f"{each.header.id}/t{number}"]
        assert len(row.positions) == each.payload.num_sampled


def test_each_fault_has_its_cause_and_harms_nobody_else(world) -> None:
    faults = {
        "boot:hang": ("boot_timeout", TrajectoryStatus.FAILED),
        "boot:die": ("boot_died", TrajectoryStatus.FAILED),
        "act:die": ("agent_died", TrajectoryStatus.TRUNCATED),
        "grade:hang": ("grader_timeout", None),
        "grade:die": ("grader_died", None),
    }
    *lost, late, well, also_well = world(*faults, "act:hang", "", "")
    for each, (cause, status) in zip(lost, faults.values(), strict=True):
        assert isinstance(each.header.reward, Ungraded)
        assert each.header.reward.cause == cause
        assert status in (None, each.header.status)
    assert causes([late, well, also_well]) == {"graded": 3}
    assert late.header.status is TrajectoryStatus.TRUNCATED
    assert late.header.cause.startswith("agent_timeout: not over within 3 s")
    assert [each.payload.num_sampled > 0 for each in lost] == [False, False, True, True, True]


def test_one_of_eight_is_lost(world) -> None:
    assert causes(world("boot:die", *[""] * 7)) == {"graded": 7, "boot_died": 1}


@pytest.mark.parametrize("trouble", [Trouble.DIES, Trouble.NAN_LOGPROB])
def test_an_engine_that_fails_in_a_turn_gives_no_reward(world, trouble: Trouble) -> None:
    engine = ScriptedEngine(
        ToyPolicy(54),
        max_context_tokens=200,
        faults=[Fault(call=Call.GENERATE, trouble=trouble, after_tokens=2, times=None)],
    )
    group = world(*[""] * 4, engine=engine)
    assert set(causes(group)) <= {"engine_error", "refused", "graded"}
    assert causes(group)["graded"] < 4
    for each in group:
        assert isinstance(each.header.reward, Ungraded) == (each.header.status is TrajectoryStatus.FAILED)


def test_an_engine_that_is_silent_to_the_end_of_an_agent_s_time_gives_no_reward(world) -> None:
    """The others had their answers, and are graded; the agent whose own doing it was that it took so long, too."""
    *silenced, well, slow = world("", "", "", "act:hang", silenced=(0, 1))
    assert causes(silenced) == {"engine_silent": 2}
    assert causes([well, slow]) == {"graded": 2}
    for each in silenced:
        assert each.header.status is TrajectoryStatus.FAILED
        assert each.header.session is not None
        assert each.header.session.turns == 1
        assert each.header.session.acting == "timeout"
    assert slow.header.status is TrajectoryStatus.TRUNCATED


def test_a_client_that_left_and_asks_again_gets_the_answer_that_was_sampled(world) -> None:
    engine = ScriptedEngine(ToyPolicy(54), max_context_tokens=200, pace=Pace(start_s=0.4))
    (once,) = world("act:retry", engine=engine)
    assert isinstance(once.header.reward, Graded)
    assert len(engine.requests) == 1
    assert len(once.payload.branches[0].turns) == 1
