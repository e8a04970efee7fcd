"""The unmodified `openai` and `anthropic` clients, over ten turns and more: rows hold what the engine was sent."""

import json

import anthropic
import openai
import pytest
from plain_parts import text
from served import serving

from fathom.core.ids import GroupId, Occurrence, TaskId, TrajectoryId
from fathom.core.records.row import rows_of
from fathom.core.records.trajectory import (
    Graded,
    TokenizerIdentity,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
)

TURNS = 11
LINES = [f'[hm {n}]so {n}~bash~{{"cmd": "ls -{n}"}}^~bash~{{"n": {n}.0}}^$' for n in range(TURNS)] + ["[ok]done$"]
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}


def rows(closed):
    header = TrajectoryHeader(
        id=TrajectoryId("t"),
        group=GroupId("g"),
        member=0,
        occurrence=Occurrence(epoch=0, index=0),
        attempt=0,
        task=TaskId("task"),
        status=closed.status,
        cause=closed.cause,
        reward=Graded(components={"correct": 1.0}, grader="g/1", answer_found=True),
        tokenizer=TokenizerIdentity(tokenizer="0" * 64, template="0" * 64),
        adapter=None,
        started_s=0.0,
        ended_s=1.0,
    )
    return rows_of(Trajectory(header=header, payload=closed.payload))


def check(served, key, lines=LINES, results=2):
    """One row; each sampled token stands behind exactly what the engine was sent for it."""
    closed = served.close(key)
    assert closed.status is TrajectoryStatus.COMPLETED
    (row,) = rows(closed)
    requests = served.answers.requests
    assert len(requests) == len(lines)
    whole = text(row.token_ids)
    for request, line in zip(requests, lines, strict=True):
        sent = text(request.prompt_ids)
        assert whole.startswith(sent + line)
    assert whole == text(requests[-1].prompt_ids) + lines[-1]
    assert text(row.token_ids[row.positions]) == "".join(lines)
    assert whole.count("t:out") == results * (len(lines) - 1)
    return closed


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(stream):
    tools = [{"type": "function", "function": {"name": "bash", "description": "runs", "parameters": SCHEMA}}]
    with (
        serving(*LINES) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=(key := served.open())) as client,
    ):
        messages = [{"role": "developer", "content": "be good"}, {"role": "user", "content": "go"}]
        for turn in range(TURNS + 1):
            if stream:
                message, reason = chat_streamed(client, messages, tools)
            else:
                reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
                message, reason = reply.choices[0].message.model_dump(), reply.choices[0].finish_reason
                assert reply.usage.completion_tokens == len(LINES[turn])
            messages.append(message)
            if turn == TURNS:
                break
            assert (reason, message["content"], message["reasoning_content"]) == (
                "tool_calls",
                f"so {turn}",
                f"hm {turn}",
            )
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"cmd": f"ls -{turn}"}
            for call in message["tool_calls"]:
                content = [{"type": "text", "text": "out"}, {"type": "text", "text": f"{turn}"}]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        assert (reason, message["content"]) == ("stop", "done")
        closed = check(served, key)
        assert closed.matched == {"exact": TURNS}


def chat_streamed(client, messages, tools):
    """By the client's own accumulation; what is not in the API (reasoning) is added up by hand."""
    options = {"include_usage": True}
    reasoning, chunks = "", 0
    with client.chat.completions.stream(model="m", messages=messages, tools=tools, stream_options=options) as events:
        for event in events:
            if event.type == "chunk" and event.chunk.choices:
                chunks += 1
                reasoning += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
        reply = events.get_final_completion()
    assert chunks > 6, "tokens are told as they come"
    assert reply.usage.total_tokens > 0
    message = reply.choices[0].message.model_dump()
    for call in message["tool_calls"] or ():
        call["function"].pop("parsed_arguments", None)
    return {k: v for k, v in message.items() if k != "parsed"} | {"reasoning_content": reasoning}, reply.choices[
        0
    ].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_responses(stream):
    tools = [{"type": "function", "name": "bash", "description": "runs", "parameters": SCHEMA, "strict": False}]
    with (
        serving(*LINES) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=(key := served.open())) as client,
    ):
        items = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
        asked = {"model": "m", "instructions": "be good", "tools": tools, "store": False}
        for turn in range(TURNS + 1):
            if stream:
                kinds = []
                with client.responses.stream(input=items, **asked) as events:
                    for number, event in enumerate(events):
                        assert event.sequence_number == number
                        kinds.append(event.type)
                    response = events.get_final_response()
                assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
                assert kinds[-1] == "response.completed"
            else:
                response = client.responses.create(input=items, **asked)
            assert response.usage.output_tokens == len(LINES[turn])
            items += [item.model_dump() for item in response.output]
            if turn == TURNS:
                break
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
            assert response.output_text == f"so {turn}"
            assert json.loads(response.output[3].arguments) == {"n": turn}
            for call in response.output[2:]:
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"out {turn}"})
        assert response.output_text == "done"
        assert check(served, key).matched == {"exact": TURNS}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(stream):
    tools = [{"name": "bash", "description": "runs", "input_schema": SCHEMA}]
    with serving(*LINES) as served, anthropic.Anthropic(base_url=served.url, api_key=(key := served.open())) as client:
        messages = [{"role": "user", "content": "go"}]
        asked = {"model": "m", "max_tokens": 100, "system": "be good", "tools": tools}
        for turn in range(TURNS + 1):
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    kinds = [event.type for event in events]
                    reply = events.get_final_message()
                assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
                assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(reply.content)
            else:
                reply = client.messages.create(messages=messages, **asked)
            assert reply.usage.output_tokens == len(LINES[turn])
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            if turn == TURNS:
                break
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (reply.stop_reason, reply.content[1].text) == ("tool_use", f"so {turn}")
            assert reply.content[2].input == {"cmd": f"ls -{turn}"}
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"out {turn}"}
                for block in reply.content[2:]
            ]
            messages.append({"role": "user", "content": results})
        assert (reply.stop_reason, reply.content[-1].text) == ("end_turn", "done")
        assert sum(check(served, key).matched.values()) == TURNS
