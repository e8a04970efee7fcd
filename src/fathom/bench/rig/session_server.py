"""A session server over an engine that says the same in no time: `python -m fathom.bench.rig.session_server`.

Reads calls from standard input, a line each, and answers each with a line. Ends when standard input does. A token is
four bytes of text, about what real tokenizers make of it, and rendering costs next to nothing: what is measured is the
session server.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import final

import msgspec
import numpy as np

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.records.message import Message, Role, Tool
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.rollout.sampled import prompt_hash
from fathom.rollout.session.plan import SessionPlan
from fathom.rollout.session.server import SessionServer
from fathom.rollout.session.sessions import Sessions
from fathom.text.chat.deltas import Delta, TextDelta

_BYTES = 4
_CHUNK = 8
"""Tokens of a chunk."""
_VERSION = PolicyVersion(incarnation=1, number=0, digest="0" * 64)


class OpenCall(msgspec.Struct, frozen=True, tag="open_sessions.1"):
    """Open sessions."""

    sessions: int
    """How many."""
    answer_tokens: int
    """Sampled tokens of each answer."""


class Opened(msgspec.Struct, frozen=True, tag="opened_sessions.1"):
    """They are open."""

    base_url: str
    """Of the server."""
    keys: tuple[str, ...]
    """Of the sessions."""


class LookCall(msgspec.Struct, frozen=True, tag="look.1"):
    """Ask what was used."""

    tidy: bool = False
    """Free what is free first: for the memory, and not while time is measured."""


class Looked(msgspec.Struct, frozen=True, tag="looked.1"):
    """What was used until now."""

    cpu_s: float
    """Seconds of the processor, all threads."""
    resident_bytes: int
    """Memory in use."""
    tokens: int
    """Tokens kept in sessions."""


class DirectCall(msgspec.Struct, frozen=True, tag="direct.1"):
    """Ask the engine directly, `at_once` generations of a context of `tokens` at a time, `rounds` times."""

    at_once: int
    """Generations that run together."""
    tokens: int
    """Of the context."""
    rounds: int
    """How often."""


class Direct(msgspec.Struct, frozen=True, tag="directly.1"):
    """What that took for one generation."""

    wall_s: float
    """Mean time from asking to the end."""
    cpu_s: float
    """Seconds of the processor."""


Call = OpenCall | LookCall | DirectCall
Answer = Opened | Looked | Direct


def tokens_of(text: str) -> np.ndarray:
    """int32: four bytes of text a token, filled up with spaces."""
    encoded = text.encode()
    return np.frombuffer(encoded + b" " * (-len(encoded) % _BYTES), np.int32)


@final
class _Renderer:
    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        return tokens_of("".join(f"<{message.role}>{message.content}" for message in messages) + "<assistant>")

    def extend(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], last_token: int | None
    ) -> np.ndarray:
        return self.render(new, tools)


@final
class _Reader:
    def __init__(self) -> None:
        self._said: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        said = np.array(token_ids, np.int32).tobytes().decode()
        self._said.append(said)
        return [TextDelta(said)]

    def end(self, finish_reason: FinishReason) -> tuple[list[Delta], Message]:
        return [], Message(role=Role.ASSISTANT, content="".join(self._said))


@final
class _Reads:
    def reader(self, tools: Sequence[Tool], stop_strings: Sequence[str], turn: str) -> _Reader:
        return _Reader()


@final
class _Engine:
    """Says as many tokens as it is asked for, a chunk at a time, and lets others go first between two chunks."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        executed = prompt_hash(request.prompt_ids)
        for start in range(0, request.max_new_tokens, _CHUNK):
            await asyncio.sleep(0)
            count = min(_CHUNK, request.max_new_tokens - start)
            last = start + count == request.max_new_tokens
            yield GenerateChunk(
                request_id=request.request_id,
                token_ids=tokens_of("word" * count),
                logprobs=np.full(count, -1.0, np.float32),
                policy_version=np.zeros(count, np.int32),
                kv_version=np.zeros(count, np.int32),
                versions=(_VERSION,),
                kept=None,
                raw_logprobs=None,
                routes=None,
                end=_end(executed) if last else None,
            )


def _end(executed: str) -> GenerateEnd:
    return GenerateEnd(
        finish_reason=FinishReason.LENGTH,
        engine=EngineId("said"),
        dtype="float32",
        kernels="none",
        prompt_hash=executed,
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.0,
        generate_s=0.0,
    )


@final
class _Rig:
    def __init__(self) -> None:
        self._engine = _Engine()
        self._sessions = Sessions(self._engine.generate, _Renderer(), _Reads(), max_tokens=2**40, idle_s=3600)
        self._server = SessionServer(self._sessions, model="bench")
        self._answer_tokens = 1

    async def serve(self) -> None:
        """Until standard input closes."""
        await self._server.start()
        gc.collect()
        gc.freeze()  # as a run does
        decoder = msgspec.json.Decoder(Call)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            answer = await self._do(decoder.decode(line))
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        await self._server.close()

    async def _do(self, call: Call) -> Answer:
        match call:
            case OpenCall():
                self._answer_tokens = call.answer_tokens
                keys = tuple(self._sessions.open(self._plan(number)) for number in range(call.sessions))
                return Opened(base_url=self._server.base_url, keys=keys)
            case LookCall():
                if call.tidy:
                    gc.collect()
                return self._look()
            case DirectCall():
                return await self._direct(call)

    def _plan(self, number: int) -> SessionPlan:
        return SessionPlan(
            name=f"s{number}",
            sampling=SamplingParams(),
            max_new_tokens=self._answer_tokens,
            max_context_tokens=2**30,
            max_turns=2**30,
            stop_ids=(),
            seed=0,
            priority=0,
            purpose=Purpose.ROLLOUT,
        )

    def _look(self) -> Looked:
        with open("/proc/self/statm") as facts:
            pages = int(facts.read().split()[1])
        return Looked(
            cpu_s=time.process_time(),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            tokens=self._sessions.tokens,
        )

    async def _direct(self, call: DirectCall) -> Direct:
        context = tokens_of("word" * call.tokens)
        request = GenerateRequest(
            request_id="direct",
            prompt_ids=context,
            sampling=SamplingParams(),
            seed=0,
            max_new_tokens=self._answer_tokens,
            stop_ids=(),
            priority=0,
            session_key="direct",
            purpose=Purpose.ROLLOUT,
        )
        cpu_s, walls_s = time.process_time(), list[float]()
        for _ in range(call.rounds):
            walls_s += await asyncio.gather(*(self._one(request) for _ in range(call.at_once)))
        return Direct(wall_s=sum(walls_s) / len(walls_s), cpu_s=(time.process_time() - cpu_s) / len(walls_s))

    async def _one(self, request: GenerateRequest) -> float:
        began_s = time.perf_counter()
        async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for _ in chunks:
                pass
        return time.perf_counter() - began_s


if __name__ == "__main__":
    asyncio.run(_Rig().serve())
