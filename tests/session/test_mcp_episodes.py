"""Whole episodes with a real tool server, over a real session: graded by the last answer, ungraded when it is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from served import serving

from fathom.config.agent import LimitsConfig
from fathom.core.ports.agent import Acting, Played, Transcript
from fathom.core.records.message import Role
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.envs.judging.scripted_judge import JudgeReply, ScriptedJudge
from fathom.envs.registry import build_environment

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

SERVER = Path(__file__).parents[1] / "connectors" / "number_server.py"
MARK = f"mcp-episodes-{os.getpid()}"
SAYS = '~keep~{"name": "a", "number": 4}^~keep~{"name": "b", "number": 5}^$', '~sum_of~{"names": ["a", "b"]}^$', "9$"


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def processes(loop, tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text('{"prompt": "Add 4 and 5 by the tools.", "answer": "9"}\n')
    environment = build_environment(
        "mcp", {"rows": {"path": str(rows)}, "server": {"command": [sys.executable, str(SERVER), MARK]}}
    )
    made = AgentProcesses(environment, LimitsConfig(boot_s=100.0))
    loop.run_until_complete(made.start())
    yield made, environment.tasks()[0]
    loop.run_until_complete(made.close())


def play(loop, processes, *says: str) -> tuple[Played, Transcript]:
    players, task = processes
    transcripts: list[Transcript] = []
    with serving(*says) as served:
        key = served.open()
        endpoint = served.call(served.server.endpoint, key)

        async def tell(acting: Acting, detail: str) -> Transcript:
            closed = await asyncio.to_thread(served.close, key)
            transcripts.append(
                Transcript(messages=closed.messages, finish_reasons=closed.finish_reasons, acting=acting, detail=detail)
            )
            return transcripts[0]

        return loop.run_until_complete(players.play(task, endpoint, tell)), transcripts[0]


def test_the_tools_are_called_and_the_last_answer_is_graded(loop, processes):
    played, transcript = play(loop, processes, *SAYS)
    assert isinstance(played.reward, Graded)
    assert played.reward.total == 1.0
    assert (played.acting, played.detail, played.fault) == (Acting.ENDED, "", "")
    told = [message.content for message in transcript.messages if message.role is Role.TOOL]
    assert told == ["a is 4", "b is 5", "9"]


def test_a_judge_may_grade_the_last_answer(loop, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Add 4 and 5 by the tools."}\n')
    with ScriptedJudge(JudgeReply(text="0.5"), JudgeReply(text="fine")) as judge:
        rows = {
            "path": str(tmp_path / "rows.jsonl"),
            "grader": "judge",
            "judge": {"base_url": judge.base_url, "model": "any"},
        }
        environment = build_environment(
            "mcp", {"rows": rows, "server": {"command": [sys.executable, str(SERVER), MARK]}}
        )
        made = AgentProcesses(environment, LimitsConfig(boot_s=100.0))
        loop.run_until_complete(made.start())
        judged, _ = play(loop, (made, environment.tasks()[0]), "9$")
        not_judged, _ = play(loop, (made, environment.tasks()[0]), "9$")
        loop.run_until_complete(made.close())
    assert isinstance(judged.reward, Graded), judged
    assert judged.reward.components == {"judge": 0.5}
    assert isinstance(not_judged.reward, Ungraded)
    assert not_judged.reward.cause == "judge_unreadable"


def test_a_server_that_dies_on_the_way_gives_no_reward(loop, processes):
    played, _ = play(loop, processes, "~die~{}^$", "9$")
    assert isinstance(played.reward, Ungraded)
    assert played.reward.cause == "tool_server_died"
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_ours(path)]


def is_ours(path: Path) -> bool:
    try:
        return MARK.encode() in path.read_bytes()
    except OSError:
        return False
