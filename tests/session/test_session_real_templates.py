"""Sessions with real tokenizers and templates: ids that no text would be encoded to survive, turn after turn."""

import json

import openai
import pytest
from served import serving

from fathom.core.records.trajectory import TrajectoryStatus
from synthetic.real_templates import model, needs_shared

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
NAMES = ("qwen2_5_instruct", "qwen3_instruct_2507", "llama3_1_instruct")
ODD = [["he", "llo"], ["\n", "\n", "a"], ["un", "believ", "able", " w", "or", "ld"]]


def odd_ids(tokenizer, parts):
    """Ids that the tokenizer would not give for their text."""
    ids = [token for part in parts for token in tokenizer.encode(part)]
    assert tokenizer.encode("".join(parts)) != ids
    return ids


@needs_shared
@pytest.mark.parametrize("name", NAMES)
def test_ids_that_do_not_encode_to_themselves_are_in_the_row_as_they_were_sampled(name):
    tokenizer, renderer, reads = model(name)
    end = tokenizer.special.eos_id
    half_an_emoji = tokenizer.encode("🜂")[:-1]
    assert half_an_emoji
    lines = [[*odd_ids(tokenizer, parts), end] for parts in ODD] + [[*half_an_emoji, end]] * 2
    with serving(*lines, renderer=renderer, reads=reads) as served:
        key = served.open(stop_ids=tokenizer.special.stop_ids)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key) as client:
            messages = [{"role": "user", "content": "go"}]
            for place in range(len(lines)):
                reply = client.chat.completions.create(model="m", messages=messages).choices[0]
                assert reply.finish_reason == "stop"
                if place < len(ODD):
                    assert reply.message.content.strip() == "".join(ODD[place]).strip()
                messages += [reply.message.model_dump(), {"role": "user", "content": f"\nön {place} 🜂"}]
        check(served, key, lines)


@needs_shared
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_calls_tools(stream):
    tokenizer, renderer, reads = model("qwen2_5_instruct")
    end = tokenizer.special.eos_id
    says = [
        'look<tool_call>\n{"name": "run", "arguments": {"path": "é"}}\n</tool_call>',
        "<tool_call>\n{broken",
        "done",
    ]
    lines = [[*tokenizer.encode(text), end] for text in says]
    with serving(*lines, renderer=renderer, reads=reads) as served:
        key = served.open(stop_ids=tokenizer.special.stop_ids)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key) as client:
            messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
            for place in range(len(lines)):
                asked = {"model": "m", "messages": messages, "tools": TOOLS}
                if stream:
                    with client.chat.completions.stream(**asked) as events:
                        reply = events.get_final_completion().choices[0]
                else:
                    reply = client.chat.completions.create(**asked).choices[0]
                said = reply.message.to_dict()
                said.pop("parsed", None)
                messages.append(said)
                if place == 0:
                    (call,) = reply.message.tool_calls
                    assert (reply.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"path": "é"})
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "[]"})
                else:
                    results = [
                        {"role": "tool", "tool_call_id": call.id, "content": "not JSON"}
                        for call in reply.message.tool_calls or ()
                    ]
                    messages += results or [{"role": "user", "content": "and now?"}]
        check(served, key, lines)


def check(served, key, lines):
    closed = served.close(key)
    assert (closed.status, closed.rendered_whole) == (TrajectoryStatus.COMPLETED, 0)
    (branch,) = closed.payload.branches
    whole = branch.token_ids.tolist()
    for request, line in zip(served.answers.requests, lines, strict=True):
        sent = request.prompt_ids.tolist()
        assert whole[: len(sent) + len(line)] == sent + line
    assert branch.token_ids[branch.loss_mask].tolist() == [token for line in lines for token in line]
