"""The built-in agent against a real server: tools are called, mistakes are told to the model, refusals end it."""

import asyncio

import httpx
import pytest
from served import serving

from fathom.core.errors import CutShortError, EngineDeadError
from fathom.core.records.message import Role
from fathom.envs.agents import AsyncTool, tool_loop

HI = [{"role": "user", "content": "hi"}]


async def double(arguments):
    return str(2 * arguments["n"])


TOOL = AsyncTool(name="double", description="Doubles.", parameters={"type": "object"}, call=double)


def talk(served, key, **given):
    endpoint = served.call(served.server.endpoint, key)
    return asyncio.run(tool_loop(endpoint, HI, [TOOL], **given))


def told(conversation):
    return [message["content"] for message in conversation if message["role"] == "tool"]


def test_it_ends_when_no_tool_is_called_and_its_history_is_one_branch():
    with serving('~double~{"n": 3}^$', 'so~double~{"n": 6}^~double~{"n": 7}^$', "done$") as served:
        key = served.open()
        conversation = talk(served, key)
        closed = served.close(key)
    assert told(conversation) == ["6", "12", "14"]
    assert conversation[-1]["content"] == "done"
    assert len(closed.payload.branches) == 1
    assert [message.role for message in closed.messages][-1] is Role.ASSISTANT


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("~halve~{}^$", "error: there is no tool 'halve'; there are: double"),
        ("~double~{n^$", "error: the arguments are not JSON"),
        pytest.param(f"~double~{'[' * 1500}^$", "error: the arguments are not JSON", id="deep"),
        ("~double~3^$", "error: the arguments are not a JSON object"),
        ("~double~{}^$", "error: KeyError: 'n'"),
    ],
)
def test_a_mistake_is_told_to_the_model(call, answer):
    with serving(call, "well$") as served:
        conversation = talk(served, served.open(max_context_tokens=10_000, max_new_tokens=2000))
    assert told(conversation)[0].startswith(answer)
    assert conversation[-1]["content"] == "well"


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_sampled_tokens": 34}, {"max_context_tokens": 60}])
def test_a_conversation_that_may_not_go_on_ends_without_an_error(limits):
    with serving(*['~double~{"n": 3}^$'] * 9) as served:
        key = served.open(**limits)
        conversation = talk(served, key)
        closed = served.close(key)
    assert 1 <= len(told(conversation)) <= 2
    assert closed.status.value == "truncated"


def test_turns_of_its_own_that_are_used_up_cut_it_short():
    with serving(*['~double~{"n": 3}^$'] * 9) as served:
        key = served.open()
        with pytest.raises(CutShortError, match=r"all 3 answers \(max_turns\) are used up"):
            talk(served, key, max_turns=3)
        assert len(served.close(key).finish_reasons) == 3
    with serving('~double~{"n": 3}^$', "done$") as served:
        assert talk(served, served.open(), max_turns=2)[-1]["content"] == "done"


def test_an_answer_has_one_deadline_however_often_it_is_asked_for():
    with serving("done$", gated=True) as served:
        key = served.open()
        with pytest.raises(httpx.ReadTimeout, match="no answer within 1 s"):
            talk(served, key, timeout_s=1.0)
        served.call(served.answers.gate.set)


def test_a_fault_of_the_engine_is_asked_again_and_what_is_refused_is_raised():
    with serving("lost$", "kept$", failure=EngineDeadError("e", "gone", "")) as served:
        assert talk(served, served.open())[-1]["content"] == "kept"
        with pytest.raises(httpx.HTTPStatusError, match="the model answered 401"):
            talk(served, "no such key")
