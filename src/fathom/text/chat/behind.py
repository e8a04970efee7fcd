"""What a template puts behind an answer, found by writing a short made-up conversation.

    made up:   user "?", answer MARK, then the new messages, opened for the next answer
    written:   ...<|im_start|>assistant\\nMARK<|im_end|>\\n<|im_start|>user\\nhello<|im_end|>\\n<|im_start|>assistant\\n
    opened:    ...<|im_start|>assistant\\n                         the same, up to the answer
    behind:                                  ^^^^^^^^^^ and all that follows

Behind a call of a tool the template closes the call first, which the model has sampled itself: MARK is then the last
argument of the last call, and the closing is what an answer that nothing follows has behind MARK, without its end.

The written text must begin with what the model was sent (`opened`), and what was thought must still be there. Where it
is not, the template does not go on from what was sampled but writes it anew, and only a full render is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import msgspec

from fathom.core.errors import DataError, NotAppendableError
from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.text.chat.template_text import TemplateText
from fathom.text.tokenizer import Tokenizer

MARK = "fathomanswer"
"""A made-up answer, of plain letters: no template alters it."""
THOUGHT = "fathomthought"
"""What is thought before it."""
_WORDS = "fathomwords"
QUESTION = Message(role=Role.USER, content="?")
_NEXT = Message(role=Role.USER, content="fathomnext")
_SYSTEM = Message(role=Role.SYSTEM, content="fathomsystem")
_TOOL = Tool(name="probe", description="Probes.", parameters=msgspec.Raw(b'{"type": "object", "properties": {}}'))
_CALL = ToolCall(id="call00000", name="probe", arguments="{}")
_RESULT = Message(role=Role.TOOL, content="fathomresult", tool_call_id=_CALL.id, name=_CALL.name)


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """What of a sampled answer matters to what is written behind it."""

    thought: bool
    """Something was thought, in this answer or on the way to it."""
    words: bool
    """Something was said beside calls, likewise."""
    calls: tuple[ToolCall, ...]
    """The calls whose results follow. Empty: none do."""


_PLAIN = Shape(thought=False, words=False, calls=())


@final
@dataclass(frozen=True, slots=True)
class Tail:
    """What goes behind an answer."""

    text: str
    """All of it, the turn's end in front."""
    end_tokens: int
    """Tokens at its beginning that end the turn, the last in the place of the stop token. 0: the template has none."""


@final
class Behind:
    """Finds tails. Their cost does not follow the history."""

    def __init__(self, text: TemplateText, tokenizer: Tokenizer) -> None:
        """Raises DataError or NotAppendableError where the template does not write an answer behind a question."""
        self._text = text
        self._tokenizer = tokenizer
        self._opened = text.write([QUESTION], (), opened=True)
        self.alone = _after_mark(text.write([QUESTION, _answer(_PLAIN)], (), opened=False), "")
        """What is written behind an answer that nothing follows."""
        closed = text.write([QUESTION], (), opened=False).rpartition(QUESTION.content)[2]
        self._user_end = tokenizer.encode(closed)[:1]
        self._plain_end = 0
        with suppress(NotAppendableError):  # no use to ask: every tail is refused in the same words
            self._plain_end = self._end_tokens(self._tail(_PLAIN, [_NEXT], (), ()).text, self.alone)
        self.follows_context = not all(map(self._is_same_in_context, ([_NEXT], [_RESULT])))
        """What is written behind an answer depends on the tools, or on a system message in front."""

    def tail(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> Tail:
        """What goes behind the last message of `before`.

        Raises:
            NotAppendableError: the template writes the answer anew when these messages follow.
            DataError: the template refuses the conversation.
        """
        open_turns = list(unsettled(before))
        thought = any(message.reasoning for message in open_turns)
        words = any(message.content and message.tool_calls for message in open_turns)
        shape = Shape(thought, words, _answered(before[-1], new))
        if len(shape.calls) > 1 and not self._text.calls_at_once:
            raise NotAppendableError("the chat template writes one tool call a message, and several were answered")
        if not self.follows_context:
            return self._tail(shape, new, (), ())
        return self._tail(shape, new, [message for message in before[:1] if message.role is Role.SYSTEM], tools)

    def opener(self, *, calls: bool) -> int | None:
        """First id of what a user says behind an answer, or, with `calls`, of a tool's result. None: there is none."""
        try:
            tail = self._tail(Shape(False, False, (_CALL,) if calls else ()), [_RESULT if calls else _NEXT], (), ())
        except (DataError, NotAppendableError):
            return None
        return next(iter(self._tokenizer.encode(tail.text)), None)

    def _tail(self, shape: Shape, new: Sequence[Message], system: Sequence[Message], tools: Sequence[Tool]) -> Tail:
        answer = _answer(shape)
        written = self._text.write([*system, QUESTION, answer, *new], tools, opened=True)
        in_context = bool(system or tools)
        opened = self._text.write([*system, QUESTION], tools, opened=True) if in_context else self._opened
        if not written.startswith(opened):
            raise NotAppendableError("the chat template writes an earlier turn otherwise than it opened it")
        lead, mark, behind = written[len(opened) :].partition(MARK)
        if not mark:
            raise NotAppendableError("the chat template leaves out earlier answers")
        if shape.thought and THOUGHT not in lead:
            raise NotAppendableError("the chat template deletes what was thought before")
        if shape.words and shape.calls and _WORDS not in lead:
            raise NotAppendableError("the chat template leaves out what is said beside a call")
        if not shape.calls:
            return Tail(behind, self._plain_end)
        alone = _after_mark(self._text.write([*system, QUESTION, answer], tools, opened=False), opened)
        closing = self._closing(alone)
        if not behind.startswith(closing):
            raise NotAppendableError("the chat template closes a tool call otherwise when its result follows")
        text = behind[len(closing) :]
        return Tail(text, self._end_tokens(text, alone[len(closing) :]))

    def _closing(self, alone: str) -> str:
        """What is written behind the last argument of a call, and the model has to sample itself."""
        if alone.endswith(self.alone):
            return alone[: len(alone) - len(self.alone)]
        for token_id in self._tokenizer.encode(alone):  # a turn that calls a tool may have an end of its own
            if token_id in self._tokenizer.special.stop_ids:
                return alone.partition(self._tokenizer.decode_token(token_id))[0]
        raise NotAppendableError("where a turn ends that calls a tool cannot be told from the chat template")

    def _end_tokens(self, followed: str, alone: str) -> int:
        """How many tokens of what follows an answer end it, by what ends one that nothing follows.

        Both ends may differ in their last token (one that is only sampled, one that is only written). The written one
        is then known from messages of users, which end with it too.
        """
        ends = self._tokenizer.encode(alone)
        stops = self._tokenizer.special.stop_ids
        count = next((number for number, token_id in enumerate(ends, 1) if token_id in stops), 0)
        begins = self._tokenizer.encode(followed)[:count]
        if (
            len(begins) < count
            or begins[:-1] != ends[: count - 1]
            or begins[-1:] not in (ends[count - 1 : count], self._user_end)
        ):
            return 0
        return count

    def _is_same_in_context(self, new: Sequence[Message]) -> bool:
        """Tools and a system message in front change nothing of what is written behind an answer."""
        shape = Shape(False, False, (_CALL,) if new[0].role is Role.TOOL else ())
        found: list[Tail | None] = []
        for system, tools in (((), ()), ((_SYSTEM,), (_TOOL,))):
            try:
                found.append(self._tail(shape, new, system, tools))
            except (DataError, NotAppendableError):
                found.append(None)
        return found[0] == found[1]


def unsettled(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages, the last first, that a template may still write otherwise: down to the answer in words before the last.

    Templates delete what led to an answer when it is given, or when a user speaks next. Both is over for what stands
    in front of an earlier answer that a user has spoken behind. Some take a user's message that begins with a tag for
    the result of a tool: that does not count.
    """
    spoken = False
    yield messages[-1]
    for message in reversed(messages[:-1]):
        if spoken and message.role is Role.ASSISTANT and not message.tool_calls:
            return
        spoken = spoken or (message.role is Role.USER and not message.content.lstrip().startswith("<"))
        yield message


def _answered(sampled: Message, new: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls that these results answer; where an agent answers one that was never made, one is made up."""
    made = {call.id: call for call in sampled.tool_calls}
    unnamed = iter(sampled.tool_calls)
    found: list[ToolCall] = []
    for number, answer in enumerate(new):
        if answer.role is not Role.TOOL:
            break
        call = made.get(answer.tool_call_id) or next(unnamed, None)
        name = answer.name or (call.name if call is not None else "tool")
        found.append(ToolCall(id=answer.tool_call_id or f"call{number:05}", name=name, arguments="{}"))
    return tuple(found)


def _answer(shape: Shape) -> Message:
    """A made-up answer that ends in MARK: in words, or as the last argument of its last call."""
    thought = THOUGHT if shape.thought else ""
    if not shape.calls:
        return Message(role=Role.ASSISTANT, content=MARK, reasoning=thought)
    marked = msgspec.structs.replace(shape.calls[-1], arguments=f'{{"key": "{MARK}"}}')
    words = _WORDS if shape.words else ""
    return Message(role=Role.ASSISTANT, content=words, reasoning=thought, tool_calls=(*shape.calls[:-1], marked))


def _after_mark(written: str, opened: str) -> str:
    _, mark, after = written[len(opened) :].partition(MARK)
    if not mark:
        raise NotAppendableError("the chat template leaves out answers")
    return after
