"""Messages to token ids, by the model's own template; and what goes behind a sampled answer, found by probing it.

A template writes a conversation as a whole, but what was sampled is never written again. So what was said since is
written in a made-up conversation that ends in a made-up answer, and what the template puts behind that answer is what
belongs behind the real one:

    made up:   system, user "?", answer MARK, then the new messages, opened for the next answer
    written:   ...<|im_start|>assistant\nMARK<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n
    appended:                                ^^^^^^^^^^ left out where it was sampled, and all that follows

Behind a call of a tool the template closes the call first, which the model has sampled itself. That closing is what the
text behind MARK has more than the text behind an answer in plain words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.errors import ConfigError, DataError, NotAppendableError
from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.text.chat.template_text import TemplateText
from fathom.text.tokenizer import Tokenizer

MARK = "fathomanswer"
"""A made-up answer, of plain letters: no template alters it."""
_QUESTION = Message(role=Role.USER, content="?")
_NEXT = Message(role=Role.USER, content="fathomnext")


@final
class TurnRenderer:
    """Renders conversations, whole or what is new of them. Letters: P prompt tokens, R tokens appended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer has no chat template, or one that does not compile."""
        if tokenizer.template is None:
            raise ConfigError("the model folder has no chat template; agents need one: choose an instruct model")
        self._tokenizer = tokenizer
        self._text = TemplateText(tokenizer.template, tokenizer.special.texts)
        self._closings: dict[int, str] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """int32 [P], P at least 1: a whole conversation, opened for the assistant's answer.

        Raises:
            DataError: the template refuses it, or nothing is left to send.
        """
        ids = self._tokenizer.encode(self._text.write(messages, tools, opened=True))
        if not ids:
            raise DataError("a prompt is empty; a model needs at least one token to go on from")
        return np.array(ids, dtype=np.int32)

    def extend(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], last_token: int | None
    ) -> np.ndarray:
        """int32 [R]: what goes behind a sampled answer, so that the model may answer again.

        Args:
            before: the conversation, the sampled answer being its last message.
            new: what was said since; no assistant.
            tools: as in `render`.
            last_token: the last sampled id. None: nothing was sampled.

        Raises:
            NotAppendableError: by this template the conversation can only be rendered as a whole.
            DataError: the template refuses it.
        """
        ids = self._tokenizer.encode(self._behind(before, new, tools))
        if ids and last_token is not None and self._ends(last_token, ids[0]):
            del ids[0]
        return np.array(ids, dtype=np.int32)

    def turn_end(self) -> str:
        """What the template puts behind an answer whatever comes next. May be empty: the next message ends it."""
        plain = self._after_mark([_QUESTION, _answer(()), _NEXT], ())
        alone = _after(self._text.write([_QUESTION, _answer(())], (), opened=False))
        return _common_prefix(plain, alone)

    def _ends(self, last_token: int, first: int) -> bool:
        """What was sampled last is what the template would write first, or ended the turn in its place."""
        if last_token == first:
            return True
        end = self._tokenizer.encode(self.turn_end())[:1]
        return end == [first] and last_token in self._tokenizer.special.stop_ids

    def _behind(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        system = [message for message in before[:1] if message.role is Role.SYSTEM]
        answers = [message for message in new if message.role is Role.TOOL]
        called = _calls(before[-1], answers) if new[0].role is Role.TOOL else ()
        for calls in (called, called[-1:]):  # some templates write one call only
            try:
                behind = self._after_mark([*system, _QUESTION, _answer(calls), *new], tools)
                closing = self._closing(len(calls)) if calls else ""
            except DataError:
                if len(calls) < 2:
                    raise
                continue
            if not behind.startswith(closing):
                raise NotAppendableError("the chat template closes a tool call in another way when its result follows")
            return behind[len(closing) :]
        raise AssertionError("one of both was tried")

    def _closing(self, calls: int) -> str:
        """What the template writes behind the arguments of the last call and the model has to sample itself."""
        if calls not in self._closings:
            made = tuple(ToolCall(id=f"call{n:05}", name="probe", arguments="{}") for n in range(calls))
            called = self._after_mark([_QUESTION, _answer(made), _NEXT], ())
            plain = self._after_mark([_QUESTION, _answer(()), _NEXT], ())
            self._closings[calls] = self._cut(called, plain)
        return self._closings[calls]

    def _cut(self, called: str, plain: str) -> str:
        if called.endswith(plain):
            return called.removesuffix(plain)
        for token_id in self._tokenizer.encode(called):  # the turn of a call may have an end of its own
            text = self._tokenizer.decode_token(token_id)
            if token_id in self._tokenizer.special.stop_ids and text in called:
                return called.partition(text)[0]
        raise NotAppendableError("where a turn ends that calls a tool cannot be told from the chat template")

    def _after_mark(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return _after(self._text.write(messages, tools, opened=True))


def _answer(calls: Sequence[ToolCall]) -> Message:
    """A made-up answer that ends in MARK: in words, or as the last argument of its last call."""
    if not calls:
        return Message(role=Role.ASSISTANT, content=MARK)
    marked = tuple(ToolCall(id=call.id, name=call.name, arguments=f'{{"key": "{MARK}"}}') for call in calls)
    return Message(role=Role.ASSISTANT, content="", tool_calls=marked)


def _calls(sampled: Message, answers: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls that these results answer; where the agent answers one that was never made, one is made up."""
    made = {call.id: call for call in sampled.tool_calls}
    unnamed = iter(sampled.tool_calls)
    found: list[ToolCall] = []
    for number, answer in enumerate(answers):
        call = made.get(answer.tool_call_id) or next(unnamed, None)
        name = answer.name or (call.name if call is not None else "tool")
        found.append(ToolCall(id=answer.tool_call_id or f"call{number:05}", name=name, arguments="{}"))
    return tuple(found)


def _after(text: str) -> str:
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise NotAppendableError("the chat template leaves out earlier answers")
    return after


def _common_prefix(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
