"""Agents whose reward comes in part from a judge: by name, or ungraded with the judge's cause, never 0 for a fault."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from agent_world import AgentWorld, causes
from judged_talks import JudgedTalkOptions, JudgedTalks
from small_runs import require_sound
from talks import TEMPLATE

from fathom import Run
from fathom.config.load import parse_config
from fathom.core.errors import NoProgressError
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus, Ungraded
from fathom.envs.judging import JudgeOptions
from fathom.envs.judging.scripted_judge import JudgeCall, JudgeReply, ScriptedJudge
from fathom.evidence.report.summary import summarise
from fathom.ledger.reader import LedgerReader
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer


def judge(call: JudgeCall) -> JudgeReply:
    """3 of 1 to 5, unless the question says otherwise."""
    if "judge:hang" in call.prompt:
        return JudgeReply(delay_s=30.0)
    return JudgeReply(text="quite good" if "judge:mumble" in call.prompt else "3")


def play(folder: Path, server: ScriptedJudge, *faults: str, **options: object) -> list[Trajectory]:
    """A group with this judge."""
    asked = {"base_url": server.base_url, "model": "j", "lowest": 1.0, "highest": 5.0, "timeout_s": 3.0, "tries": 1}
    environment = JudgedTalks(JudgedTalkOptions(judge=JudgeOptions.model_validate({**asked, **options})))
    world = AgentWorld(environment, folder, grade_s=20.0)

    async def go() -> list[Trajectory]:
        async with world.processes:
            return await world.play(*faults)

    return asyncio.run(go())


def test_a_judge_is_one_component_of_the_reward_or_the_reason_for_none(tmp_path: Path) -> None:
    with ScriptedJudge(judge) as server:
        well, silent, mumbling = group = play(tmp_path, server, "", "judge:hang", "judge:mumble")
        asked = [call.prompt for call in server.calls]
    reward = well.header.reward
    assert isinstance(reward, Graded)
    assert set(reward.components) == {"letters", "judge"}
    assert reward.components["judge"] == 0.5
    assert reward.total == pytest.approx(reward.components["letters"] + 0.5)
    assert reward.grader == "talk/1 + judge/1"
    assert causes(group) == {"graded": 1, "judge_timeout": 1, "judge_unreadable": 1}
    assert len(asked) == 3
    assert all(" How good is this? " in each for each in asked)
    for each in (silent, mumbling):
        assert isinstance(each.header.reward, Ungraded)
        assert each.header.reward.detail
        assert each.header.status is not TrajectoryStatus.FAILED, "the agent did its work; only its worth is unknown"
        assert each.payload.num_sampled > 0
        assert each.header.session is not None
        assert (each.header.session.turns, each.header.session.fault) == (3, "")


def test_episodes_share_the_budget_of_the_judge_and_the_rest_is_ungraded_by_name(tmp_path: Path) -> None:
    with ScriptedJudge(JudgeReply(text="5")) as server:
        group = play(tmp_path, server, *[""] * 4, max_calls=2)
        assert len(server.calls) == 2
    assert causes(group) == {"graded": 2, "judge_budget": 2}
    for each in group:
        if isinstance(each.header.reward, Ungraded):
            assert each.header.reward.detail == "all 2 calls of the judge are used up; raise max_calls"


def test_a_run_whose_judge_has_spent_its_budget_ends_and_the_cause_is_counted(tmp_path: Path) -> None:
    """Never with rewards of 0: groups without a reward run again, are given up, and nothing is left to train on."""
    model = tmp_path / "model"
    model.mkdir()
    save_character_tokenizer(model)
    described = model / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"chat_template": TEMPLATE}))
    make_tiny("arithmetic", 0, model)
    with ScriptedJudge(JudgeReply(text="3")) as server:
        asked = {"base_url": server.base_url, "model": "j", "lowest": 1, "highest": 5, "max_calls": 8}
        table = {
            "name": "judged",
            "runs_dir": str(tmp_path / "runs"),
            "model": {"path": str(model)},
            "task": {"kind": "judged_talks:JudgedTalks", "options": {"judge": asked, "talk": {"turns": 1}}},
            "rollout": {"group_size": 2, "max_in_flight": 8, "max_new_tokens": 8, "max_prompt_tokens": 120},
            "engine": {"kind": "scripted"},
            "trainer": {"steps": 1000, "groups_per_step": 1, "optimizer": {"lr": 1e-3}},
        }
        with pytest.raises(NoProgressError, match=r"ungraded|too_few_graded|attempts"):
            Run(parse_config(table, "judged")).start()
        assert len(server.calls) == 8
    (folder,) = (tmp_path / "runs").iterdir()
    require_sound(folder)
    with LedgerReader(folder / "ledger") as reader:
        rewards = [reader.trajectory(each.id).trajectory.header.reward for each in reader.trajectories()]
        counted = dict(summarise(reader).ungraded)
    graded = [reward for reward in rewards if isinstance(reward, Graded)]
    assert len(graded) == 8
    assert all(reward.components["judge"] == 0.5 for reward in graded)
    assert counted["judge_budget"] == len(rewards) - 8
