"""The smallest parts of a session: characters as tokens, an engine that says what it is told, a log of its requests."""

import numpy as np

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.rollout.sampled import prompt_hash
from fathom.rollout.session.plan import SessionPlan
from fathom.rollout.session.session import Session
from fathom.text.chat.deltas import TextDelta

END = ord("$")
VERSION = PolicyVersion(incarnation=1, number=0, digest="d")


def ids(text: str) -> np.ndarray:
    return np.array([each if isinstance(each, int) else ord(each) for each in text], np.int32)


def text(token_ids) -> str:
    return "".join(chr(each) for each in token_ids)


class PlainRenderer:
    """`u:hello$a:` and so on. `$` ends a turn and may have been sampled already."""

    def render(self, messages, tools):
        return ids("".join(f"{each.role[0]}:{each.content}$" for each in messages) + "a:")

    def extend(self, before, new, tools, last_token):
        assert before[-1].role is Role.ASSISTANT
        return ids(("" if last_token == END else "$") + text(self.render(new, tools)))


class PlainReader:
    def __init__(self) -> None:
        self.said = ""

    def feed(self, token_ids):
        new = text(token_ids).replace("$", "")
        self.said += new
        return [TextDelta(new)] if new else []

    def end(self, finish_reason):
        return [], Message(role=Role.ASSISTANT, content=self.said)


class PlainReads:
    def reader(self, tools, stop_strings, turn):
        return PlainReader()


class Answers:
    """Says its lines (letters, or lists of ids), one token a chunk; waits for `gate` before the last one."""

    def __init__(self, *lines: str, gate=None, failure: Exception | None = None) -> None:
        self.lines = list(lines)
        self.requests = []
        self.gate = gate
        self.failure = failure

    async def __call__(self, request):
        self.requests.append(request)
        line = self.lines.pop(0)
        limit = line[: request.max_new_tokens]
        for place, letter in enumerate(limit):
            last = place == len(limit) - 1
            if last and self.gate is not None:
                await self.gate.wait()
            if last and self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            yield self.chunk(request, letter, last, FinishReason.STOP if line == limit else FinishReason.LENGTH)

    def chunk(self, request, letter, last, reason):
        end = GenerateEnd(
            finish_reason=reason,
            engine=EngineId("e"),
            dtype="float32",
            kernels="plain",
            prompt_hash=prompt_hash(request.prompt_ids),
            cached_tokens=0,
            drafted_tokens=0,
            accepted_tokens=0,
            queue_s=0.0,
            generate_s=0.0,
        )
        return GenerateChunk(
            request_id=request.request_id,
            token_ids=ids([letter]),
            logprobs=np.full(1, -1.0, np.float32),
            policy_version=np.zeros(1, np.int32),
            kv_version=np.zeros(1, np.int32),
            versions=(VERSION,),
            kept=None,
            raw_logprobs=None,
            routes=None,
            end=end if last else None,
        )


def session(answers, **changes) -> Session:
    plan = {
        "name": "t",
        "sampling": SamplingParams(),
        "max_new_tokens": 50,
        "max_context_tokens": 200,
        "max_turns": 20,
        "stop_ids": (END,),
        "seed": 0,
        "priority": 0,
        "purpose": Purpose.ROLLOUT,
    }
    return Session(SessionPlan(**(plan | changes)), answers, PlainRenderer(), PlainReads())
