"""What the session server costs: a turn over HTTP beside the same generation asked for directly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar, final
from urllib.parse import urlsplit

import msgspec

from fathom.bench.options import SessionOptions
from fathom.bench.record import Measured, Sample, Say, Target, median
from fathom.bench.rig.session_server import Call, Direct, DirectCall, LookCall, Looked, OpenCall, Opened
from fathom.core.errors import EngineError

_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_CPU_S = 0.003
_GROWTH = 1.5
_END_S = 10.0


def session(options: SessionOptions, say: Say) -> Measured:
    """One process for each number of sessions; all sessions take their turns together."""
    samples: list[Sample] = []
    for repeat in range(options.repeats):
        for sessions in options.sessions:
            with _process() as process:
                measured = asyncio.run(_measure(_Rig(process), options, sessions, repeat))
            samples += measured
            for history in options.turns:
                cpu = median(measured, _variant(sessions, history), "CPU per turn")
                say(f"{_variant(sessions, history)}: {cpu:.2f} ms of CPU per turn")
    note = (
        f"A turn adds {2 * options.new_tokens} tokens, half of them sampled. The engine answers at once and the "
        "template costs nothing; the client is in another process. CPU is the server's, HTTP included."
    )
    return Measured(samples=samples, targets=_targets(samples, options), notes=[note])


async def _measure(rig: _Rig, options: SessionOptions, sessions: int, repeat: int) -> list[Sample]:
    opened = rig.ask(OpenCall(sessions=sessions, answer_tokens=options.new_tokens), Opened)
    agents = [_Agent(opened.base_url, key, options) for key in opened.keys]
    await asyncio.gather(*(agent.connect() for agent in agents))
    empty = rig.ask(LookCall(tidy=True), Looked)
    samples: list[Sample] = []
    for turn in range(max(options.turns) + options.window):
        before = rig.ask(LookCall(), Looked) if turn in options.turns else None
        if before is None:
            await asyncio.gather(*(agent.turn() for agent in agents))
            continue
        walls_s: list[float] = []
        for _ in range(options.window):
            walls_s += await asyncio.gather(*(agent.turn() for agent in agents))
        cpu_s = (rig.ask(LookCall(), Looked).cpu_s - before.cpu_s) / len(walls_s)
        direct = rig.ask(DirectCall(at_once=sessions, tokens=before.tokens // sessions, rounds=options.window), Direct)
        for measure, seconds in (
            ("CPU per turn", cpu_s),
            ("wall per turn", sum(walls_s) / len(walls_s)),
            ("direct: CPU", direct.cpu_s),
            ("direct: wall", direct.wall_s),
        ):
            samples.append(_sample(_variant(sessions, turn), measure, "ms", repeat, seconds * 1e3))
    full = rig.ask(LookCall(tidy=True), Looked)
    grown = (full.resident_bytes - empty.resident_bytes) / sessions
    for measure, unit, value in (
        ("memory per session", "KiB", grown / 1024),
        ("tokens per session", "tokens", full.tokens / sessions),
    ):
        samples.append(_sample(_variant(sessions, max(options.turns)), measure, unit, repeat, value))
    for agent in agents:
        agent.close()
    return samples


@final
class _Agent:
    """Sends its whole history with every call, over one connection."""

    def __init__(self, base_url: str, key: str, options: SessionOptions) -> None:
        self._address = urlsplit(base_url)
        self._key = key
        self._question = "ask " * options.new_tokens
        self._messages: list[dict[str, str]] = []

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    async def turn(self) -> float:
        """Seconds from the request to the last byte of the answer."""
        self._messages.append({"role": "user", "content": self._question})
        body = msgspec.json.encode({"model": "bench", "messages": self._messages})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"authorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began_s = time.perf_counter()
        self._writer.write(head.encode() + body)
        await self._writer.drain()
        answer = await self._answer()
        taken_s = time.perf_counter() - began_s
        self._messages.append({"role": "assistant", "content": answer})
        return taken_s

    async def _answer(self) -> str:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        body = await self._reader.readexactly(length)
        if " 200 " not in head.partition("\r\n")[0]:
            raise EngineError("session server", f"answered {body.decode()}")
        return msgspec.json.decode(body)["choices"][0]["message"]["content"]

    def close(self) -> None:
        self._writer.close()


@final
class _Rig:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, call: Call, kind: type[_Answer]) -> _Answer:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdin.write(msgspec.json.encode(call) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=kind)


@contextmanager
def _process() -> Generator[subprocess.Popen[bytes], None, None]:
    command = [sys.executable, "-m", "fathom.bench.rig.session_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _variant(sessions: int, history: int) -> str:
    return f"{sessions} sessions, {history} turns"


def _sample(variant: str, measure: str, unit: str, repeat: int, value: float) -> Sample:
    return Sample(variant=variant, measure=measure, unit=unit, repeat=repeat, value=value)


def _targets(samples: Sequence[Sample], options: SessionOptions) -> list[Target]:
    targets: list[Target] = []
    first, last = min(options.turns), max(options.turns)
    for sessions in options.sessions:
        late = median(samples, _variant(sessions, last), "CPU per turn")
        early = median(samples, _variant(sessions, first), "CPU per turn")
        for claim, measured, limit in (
            (f"{sessions} sessions: CPU of turn {last} over that of turn {first}", late / early, _GROWTH),
            (f"{sessions} sessions: ms of CPU of turn {last}", late, _CPU_S * 1e3),
        ):
            targets.append(Target(claim=claim, measured=measured, limit=limit, at_most=True, required=False))
    return targets
