"""A session server in a thread, over an engine that says what it is told, for clients that know nothing of it."""

import asyncio
import threading
from contextlib import contextmanager

from plain_parts import END, Answers, PlainRenderer, text

from fathom.core.records.message import Message, Role, ToolCall
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.rollout.session.plan import SessionPlan
from fathom.rollout.session.server import SessionServer
from fathom.rollout.session.sessions import Sessions
from fathom.text.chat.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun


class MarkedReader:
    """Reads `[thought]said~tool~arguments^`, a letter at a time."""

    def __init__(self) -> None:
        self.state = "text"
        self.parts = {"text": "", "think": ""}
        self.calls = []
        self.name = ""

    def feed(self, token_ids):
        return [delta for letter in text(token_ids) for delta in self.letter(letter)]

    def letter(self, letter):
        moves = {("text", "["): "think", ("think", "]"): "text", ("text", "~"): "name", ("args", "^"): "text"}
        if letter == "$":
            return
        if (self.state, letter) == ("name", "~"):
            self.calls.append([f"call_{id(self)}_{len(self.calls)}", self.name, ""])
            yield ToolCallBegun(len(self.calls) - 1, *self.calls[-1][:2])
            self.name, self.state = "", "args"
        elif (self.state, letter) in moves:
            self.state = moves[self.state, letter]
        elif self.state == "name":
            self.name += letter
        elif self.state == "args":
            self.calls[-1][2] += letter
            yield ToolArgumentsDelta(len(self.calls) - 1, letter)
        else:
            self.parts[self.state] += letter
            yield TextDelta(letter) if self.state == "text" else ReasoningDelta(letter)

    def end(self, finish_reason):
        calls = tuple(ToolCall(id=each[0], name=each[1], arguments=each[2]) for each in self.calls)
        said = self.parts
        return [], Message(role=Role.ASSISTANT, content=said["text"], reasoning=said["think"], tool_calls=calls)


class MarkedReads:
    def reader(self, tools, stop_strings, turn):
        return MarkedReader()


class Served:
    """Opens and closes sessions in the server's loop; `answers` is the engine."""

    def __init__(self, loop, server, sessions, answers) -> None:
        self.loop = loop
        self.server = server
        self.sessions = sessions
        self.answers = answers
        self.opened = 0

    @property
    def url(self):
        return self.server.base_url

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def open(self, **changes) -> str:
        self.opened += 1
        plan = {
            "name": f"s{self.opened}",
            "sampling": SamplingParams(),
            "max_new_tokens": 200,
            "max_context_tokens": 5000,
            "max_turns": 40,
            "stop_ids": (END,),
            "seed": 0,
            "priority": 0,
            "purpose": Purpose.ROLLOUT,
        }

        async def opening():
            return self.sessions.open(SessionPlan(**(plan | changes)))

        return self.do(opening())

    def close(self, key):
        return self.do(self.sessions.close(key))

    def call(self, function, *arguments):
        """Call something in the loop."""

        async def calling():
            return function(*arguments)

        return self.do(calling())


@contextmanager
def serving(*lines, failure=None, gated=False, renderer=None, reads=None, **options):
    """A server whose engine says these lines. `gated`: answers wait for `answers.gate` before their last token."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    answers = Answers(*lines, failure=failure)
    sessions = Sessions(answers, renderer or PlainRenderer(), reads or MarkedReads(), max_tokens=100_000, idle_s=60)
    server = SessionServer(sessions, model="m", **options)
    served = Served(loop, server, sessions, answers)
    if gated:
        answers.gate = served.call(asyncio.Event)
    try:
        served.do(server.start())
        yield served
    finally:
        served.do(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
