"""Tools of a real MCP server: offered, called, their errors told, and a server that is gone is known to be."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fathom.core.ids import TaskId

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from fathom.envs.mcp import ToolServer, ToolServerError, ToolServerOptions, ToolServers

COMMAND = (sys.executable, str(Path(__file__).with_name("number_server.py")))


def options(*arguments: str, **more) -> ToolServerOptions:
    return ToolServerOptions(command=(*COMMAND, *arguments), **more)


async def start(given: ToolServerOptions) -> ToolServer:
    return await ToolServers(given).start(TaskId("t7"))


def children() -> set[int]:
    """Direct children of this process that are our server."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == os.getpid():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def numbers(loop):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "of the run")
        server = loop.run_until_complete(
            start(options("{task}", variables={"TASK": "for {task}"}, call_timeout_s=60.0, output_chars=100))
        )
    yield server
    loop.run_until_complete(server.close())


def test_tools_are_offered_under_names_that_providers_allow(numbers):
    assert [tool.name for tool in numbers.tools] == ["keep", "sum_of", "wait", "die", "whoami", "much"]
    keep = numbers.tools[0]
    assert keep.description == "Keep a number under a name."
    assert keep.parameters["required"] == ["name", "number"]


def test_calls_are_answered_and_the_server_remembers(loop, numbers):
    async def calls():
        by_name = {tool.name: tool for tool in numbers.tools}
        told = [await by_name["keep"].call({"name": name, "number": number}) for name, number in (("a", 2), ("b", 3))]
        return [*told, await by_name["sum_of"].call({"names": ["a", "b"]})]

    assert loop.run_until_complete(calls()) == ["a is 2", "b is 3", "5"]


@pytest.mark.parametrize(
    ("name", "arguments"), [("sum.of", {"names": ["nobody"]}), ("keep", {"name": "a"}), ("halve", {})]
)
def test_an_error_of_a_tool_is_told(loop, numbers, name, arguments):
    assert loop.run_until_complete(numbers.call(name, arguments)).startswith("error: ")
    assert not numbers.lost


def test_a_server_gets_its_own_variables_and_no_secret(loop, numbers):
    assert loop.run_until_complete(numbers.call("whoami", {})) == "['t7'] for t7 no secret"


def test_long_results_are_cut_in_the_middle(loop, numbers):
    told = loop.run_until_complete(numbers.call("much", {"chars": 5000}))
    assert "[... 4901 characters are left out ...]" in told
    assert told.endswith("z")
    assert len(told) < 200


def test_a_call_has_a_deadline_and_no_program_is_left(loop):
    before = children()

    async def play() -> None:
        server = await start(options(tools=("wait",), call_timeout_s=0.5))
        try:
            assert [tool.name for tool in server.tools] == ["wait"]
            with pytest.raises(Exception, match="timed out"):
                await server.call("wait", {"seconds": 20})
            assert not server.lost
        finally:
            await server.close()

    loop.run_until_complete(play())
    assert children() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (options("broken"), "it wrote: cannot start today"),
        (ToolServerOptions(command=("no-such-program",)), "no-such-program"),
        (options(tools=("keep", "halve")), "it has no tool halve; it has keep, sum.of, wait"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(loop, given, message):
    before = children()
    with pytest.raises(ToolServerError, match=message):
        loop.run_until_complete(start(given))
    assert children() == before


def test_a_start_that_is_given_up_leaves_no_program(loop):
    before = children()

    async def give_up() -> None:
        starting = asyncio.create_task(start(options()))
        await asyncio.sleep(0.3)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()

    loop.run_until_complete(give_up())
    assert children() == before


def test_a_server_that_dies_is_known_to_be_lost(loop, numbers):
    """Last: it ends the server of the tests above."""
    for _ in range(2):
        with pytest.raises(ToolServerError, match="ended while die was called"):
            loop.run_until_complete(numbers.call("die", {}))
    assert "ended while die was called" in numbers.lost
