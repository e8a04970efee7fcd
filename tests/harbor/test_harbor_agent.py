"""A model with a bash tool on a Harbor task, in the processes that runs play episodes in."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harbor_folders import TASK_TOML, make_task

from fathom.config.agent import LimitsConfig
from fathom.core.ports.agent import Acting, Endpoint, Played, Transcript
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses
from fathom.envs.harbor import HarborEnvironment, HarborOptions

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


class Model(ThreadingHTTPServer):
    """Calls bash with the next of the commands whose list the key names; then says that it is done."""

    def __init__(self, commands: dict[str, list[Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.commands = commands
        self.requests: list[dict[str, Any]] = []


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Model)
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(asked)
        commands = self.server.commands[self.headers["authorization"].removeprefix("Bearer ")]
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if turn < len(commands):
            function = {"name": "bash", "arguments": json.dumps(commands[turn])}
            message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        body = json.dumps({"choices": [{"finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def model() -> Iterator[Model]:
    with Model({}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def play(folder: Path, model: Model, keys: list[str], agent_s: float = 8.0, **options: Any) -> list[Played]:
    """One episode for each key, side by side."""
    environment = HarborEnvironment(HarborOptions(folders=(str(folder),), **options))
    limits = LimitsConfig(boot_s=60, agent_s=agent_s, grade_s=60, close_s=60)
    (task,) = environment.tasks()

    async def tell(acting: Acting, detail: str) -> Transcript:
        return Transcript(messages=(), finish_reasons=(), acting=acting, detail=detail)

    async def go() -> list[Played]:
        url = f"http://127.0.0.1:{model.server_address[1]}"
        async with AgentProcesses(environment, limits) as processes:
            ends = [Endpoint(base_url=url, key=key, model="m") for key in keys]
            return await asyncio.gather(*(processes.play(task, end, tell) for end in ends))

    return asyncio.run(go())


def bwraps() -> set[int]:
    """Sandboxes of this machine, also those that others run."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(b"/usr/bin/bwrap"):
                found.add(int(path.parent.name))
    return found


def require_gone(left: set[int]) -> None:
    """One that leaked would stay; what others started meanwhile ends soon."""
    deadline = time.monotonic() + 30
    while left & bwraps():
        assert time.monotonic() < deadline, f"sandboxes are left: {left & bwraps()}"
        time.sleep(0.1)


def test_a_model_works_in_the_sandbox_and_is_graded_whatever_it_does(tmp_path: Path, model: Model) -> None:
    before = bwraps()
    model.commands |= {
        "right": [{"command": "wc -l < in"}, {"command": "echo 5 > out"}],
        "wrong": [{"command": "echo 4 > out"}],
        "late": [{"command": "echo 5 > out"}, {"command": "sleep 100 & sleep 100"}],
        "odd": [{"cmd": 3}, "text", {"command": "exit 9"}, {"command": "echo 5 > out; kill -9 -1"}],
    }
    right, wrong, late, odd = play(make_task(tmp_path), model, ["right", "wrong", "late", "odd"], system="s")
    assert [one.reward.total for one in (right, wrong, late, odd) if isinstance(one.reward, Graded)] == [1, 0, 1, 1]
    assert (right.acting, late.acting, odd.acting) == (Acting.ENDED, Acting.TIMEOUT, Acting.ENDED)
    assert {one.fault for one in (right, wrong, late, odd)} == {""}
    said = {
        message["content"] for asked in model.requests for message in asked["messages"] if message["role"] == "tool"
    }
    assert {"5", "", "error: bash takes a text named 'command'", "[exit code 9]"} <= said
    assert model.requests[0]["messages"][:2] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Count the lines of in."},
    ]
    assert model.requests[0]["tools"][0]["function"]["name"] == "bash"
    require_gone(bwraps() - before)


def test_limits_of_the_task_and_of_the_agent_cut_it_short(tmp_path: Path, model: Model) -> None:
    model.commands |= {"late": [{"command": "echo 5 > out"}, {"command": "sleep 100"}], "long": [{"command": "ls"}] * 9}
    brief = make_task(tmp_path, toml=TASK_TOML.replace("timeout_sec = 30", "timeout_sec = 1.2"))
    (late,) = play(brief, model, ["late"], agent_s=60.0)
    assert (late.acting, late.detail) == (Acting.TIMEOUT, "not over within 1.2 s ([agent] timeout_sec of task.toml)")
    assert isinstance(late.reward, Graded)
    (long,) = play(make_task(tmp_path, "long"), model, ["long"], agent_s=60.0, max_turns=3)
    assert (long.acting, long.detail) == (Acting.TIMEOUT, "all 3 answers (max_turns) are used up")
    assert isinstance(long.reward, Graded)


def test_tests_that_give_no_reward_make_an_ungraded_episode(tmp_path: Path, model: Model) -> None:
    model.commands["key"] = [{"command": "echo 5 > out"}]
    (played,) = play(make_task(tmp_path, test="exit 1\n"), model, ["key"])
    assert isinstance(played.reward, Ungraded)
    assert played.reward.cause == "grader_error"
    assert "left no reward (exit code 1)" in played.reward.detail
