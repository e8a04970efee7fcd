"""Comparing a group: in the grader's processes, under its deadline, and a failure is everybody's and has a cause."""

from __future__ import annotations

import asyncio

import pytest
from comparing_environments import Comparing, ComparingAgents, NotAsync, task

from fathom.config.agent import LimitsConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.environment import GroupGrade, GroupMember
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.envs.grading import Grader
from fathom.envs.registry import require_environment

MEMBERS = [
    GroupMember(
        member=place,
        messages=(Message(role=Role.ASSISTANT, content=said),),
        reward=Graded(components={"own": 1.0}, grader="own/1", answer_found=True),
    )
    for place, said in ((0, "ab"), (2, "abcd"))
]
FAULTS = {
    "hang": "group_timeout",
    "block": "group_timeout",
    "die": "group_died",
    "raise": "group_error",
    "named": "judge_budget",
    "short": "group_error",
    "twice": "group_error",
    "nan": "group_error",
    "overflow": "group_error",
    "none": "group_error",
}


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["single-turn", "agents"])
def players(loop, request):
    if request.param == "agents":
        limits = LimitsConfig(grade_s=2.0, grace_s=1.5)
        made: AgentProcesses | Grader = AgentProcesses(ComparingAgents(), limits)
    else:
        made = Grader(Comparing(), workers=1, timeout_s=2.0)
    loop.run_until_complete(made.start())
    yield made
    loop.run_until_complete(made.close())


def test_each_member_gets_its_value(loop, players):
    grade = loop.run_until_complete(players.grade_group(task(""), MEMBERS))
    assert grade == GroupGrade(components={"length": (0.5, 1.0)}, grader="c/1")


@pytest.mark.parametrize("deed", FAULTS)
def test_a_fault_has_a_cause_and_harms_no_other_group(loop, players, deed):
    lost = loop.run_until_complete(players.grade_group(task(deed), MEMBERS))
    assert isinstance(lost, Ungraded)
    assert lost.cause == FAULTS[deed]
    assert lost.detail
    assert isinstance(loop.run_until_complete(players.grade_group(task(""), MEMBERS)), GroupGrade)


def test_a_grader_names_its_own_cause(loop):
    async def grade():
        async with Grader(Comparing(), workers=1, timeout_s=30.0) as grader:
            return await grader.grade(task(""), "no budget")

    assert loop.run_until_complete(grade()) == Ungraded(cause="judge_budget", detail="all calls are used up")


def test_grade_group_is_a_coroutine_function():
    assert require_environment(Comparing(), "here")
    with pytest.raises(ConfigError, match="write `async def grade_group`"):
        require_environment(NotAsync(), "here")
