"""What holds of a chat template, found by writing made-up conversations with it. No list of model families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fathom.core.errors import DataError, NotAppendableError
from fathom.core.records.message import Message, Role, ToolCall
from fathom.text.chat.behind import MARK, QUESTION, THOUGHT, Behind
from fathom.text.chat.reading.learn import learn_calls, learn_thoughts
from fathom.text.chat.reading.written import CallsWritten, ChannelCalls, ThoughtsWritten
from fathom.text.chat.template_text import TemplateText
from fathom.text.chat.uses import Use
from fathom.text.tokenizer import Tokenizer

_NO_TURNS = "the chat template does not write an answer behind a question"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProperties:
    """A template's report."""

    turn_end: str
    """Written behind an answer whatever follows. Empty: the next message's beginning ends it."""
    sampled_end: str
    """The stop token that ends an answer when sampled. Empty: none of the turn's end is a stop token."""
    openers: frozenset[int]
    """Ids that a message of a user, a tool or the system begins with."""
    stop_opens_next: bool
    """An answer ends with a stop token that opens the next message, and is then not written again."""
    begins: str
    """Its own beginning-of-sequence token. Empty: it writes none."""
    tokenizer_begins: bool
    """The tokenizer would put one in front of plain text. The template alone decides for conversations."""
    adds_in_front: str
    """What it writes in front of a conversation by itself, the token that begins it left out. Empty: nothing."""
    opens_with: str
    """What it opens an answer with behind a user's message."""
    strips: tuple[str, ...]
    """Whose words it writes without whitespace at their ends, by role."""
    calls_as: str
    """How it wants the arguments of a tool call: `mapping` or `text`. Empty: it writes no tool calls."""
    calls_at_once: bool
    """It writes several calls in one message."""
    between_results: str
    """Written between two results in a row. Empty: it does not write two."""
    calls: CallsWritten | None
    """How it writes a call, as far as it can be read again. None: calls are left as text."""
    thoughts: ThoughtsWritten | None
    """How it marks what is thought. None: not at all."""
    thinks: bool
    """Answers may hold thoughts that are told apart from words."""
    uses: dict[Use, str]
    """For each use, why what was sampled cannot be gone on from. Empty: it can."""

    @property
    def meant(self) -> list[Use]:
        """Uses that a model of this template has: with thoughts only where it thinks, with calls where it calls."""
        thinking, calling = {Use.THOUGHT_TEXT, Use.THOUGHT_TOOLS}, {Use.TOOLS, Use.SEVERAL, Use.THOUGHT_TOOLS}
        left_out = set[Use]() if self.thinks else thinking
        if not self.calls_as:
            left_out |= calling | {Use.WORDS_TEXT, Use.WORDS_TOOLS}
        return [use for use in Use if use not in left_out]

    @property
    def appendable(self) -> bool:
        """For all these uses conversations go on from what was sampled."""
        return not any(self.uses[use] for use in self.meant)


def probe(text: TemplateText, behind: Behind | None, tokenizer: Tokenizer) -> TemplateProperties:
    """Try a template. `behind`: None where it does not write a question and an answer at all."""
    stops = tokenizer.special.stop_ids
    opened = _written(text, [QUESTION], opened=True)
    closed = _written(text, [QUESTION], opened=False)
    openers = _openers(behind, tokenizer)
    end = _turn_end(behind, tokenizer)
    begin = tokenizer.special.texts.get("bos_token", "")
    sampled = [token_id for token_id in tokenizer.encode(behind.alone if behind else "") if token_id in stops][:1]
    calls, thoughts = learn_calls(text), learn_thoughts(text, opened)
    return TemplateProperties(
        turn_end=end,
        sampled_end="".join(tokenizer.decode_token(token_id) for token_id in sampled),
        openers=openers,
        stop_opens_next=not end and any(token_id in stops for token_id in openers),
        begins=begin if begin and opened.startswith(begin) else "",
        tokenizer_begins=tokenizer.special.bos_id is not None,
        adds_in_front=_added(text, closed, begin),
        opens_with=opened[len(closed) :] if opened.startswith(closed) else "",
        strips=tuple(role.value for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT) if _strips(text, role)),
        calls_as=text.calls_as,
        calls_at_once=text.calls_at_once,
        between_results=_between_results(text),
        calls=calls,
        thoughts=thoughts,
        thinks=thoughts is not None or isinstance(calls, ChannelCalls),
        uses={use: _NO_TURNS if behind is None else _refusal(text, behind, _TRIED[use]) for use in Use},
    )


# Uses -----------------------------------------------------------------------------------------------------------------


def _said(role: Role, number: int) -> Message:
    return Message(role=role, content=f"fathomword{number}")


def _made(number: int, *, thought: bool = False, words: bool = False, calls: int = 0) -> Message:
    made = tuple(
        ToolCall(id=f"call0{number}0{n}", name=f"probe{n}", arguments=f'{{"key": "fathomvalue{number}{n}"}}')
        for n in range(calls)
    )
    return Message(
        role=Role.ASSISTANT,
        content=f"fathomword{number}" if words or not calls else "",
        reasoning=f"{THOUGHT}{number}" if thought else "",
        tool_calls=made,
    )


def _results(number: int, calls: int) -> list[Message]:
    return [
        Message(role=Role.TOOL, content=f"fathomresult{number}{n}", tool_call_id=f"call0{number}0{n}", name=f"probe{n}")
        for n in range(calls)
    ]


def _tools(*, thought: bool = False, words: bool = False, ends: bool = False) -> list[Message]:
    rounds = [_said(Role.USER, 0)]
    for number in (1, 2):
        rounds += [_made(number, thought=thought, words=words, calls=1), *_results(number, 1)]
    return [*rounds, _made(3), _said(Role.USER, 4)] if ends else rounds


_TRIED: dict[Use, list[Message]] = {
    Use.TEXT: [_said(Role.USER, 0), _made(1), _said(Role.USER, 2), _made(3), _said(Role.USER, 4)],
    Use.TOOLS: _tools(ends=True),
    Use.SEVERAL: [_said(Role.USER, 0), _made(1, calls=2), *_results(1, 2)],
    Use.THOUGHT_TEXT: [_said(Role.USER, 0), _made(1, thought=True), _said(Role.USER, 2)],
    Use.THOUGHT_TOOLS: _tools(thought=True),
    Use.WORDS_TEXT: _tools(words=True, ends=True),
    Use.WORDS_TOOLS: _tools(words=True),
    Use.SYSTEM: [_said(Role.USER, 0), _made(1), _said(Role.SYSTEM, 2), _said(Role.USER, 3)],
}


def _refusal(text: TemplateText, behind: Behind, conversation: Sequence[Message]) -> str:
    """Why the conversation cannot be gone on from at each of its answers. Empty: what is appended is right."""
    answers = [place for place, message in enumerate(conversation) if message.role is Role.ASSISTANT]
    for answer, following in zip(answers, [*answers[1:], len(conversation)], strict=True):
        try:
            sent = text.write(conversation[:answer], (), opened=True)
            tail = behind.tail(conversation[: answer + 1], conversation[answer + 1 : following], ())
            whole = text.write(conversation[:following], (), opened=True)
        except (DataError, NotAppendableError) as error:
            return str(error)
        if not all(said.content in tail.text for said in conversation[answer + 1 : following]):
            return "the chat template leaves such messages out"
        if not whole.startswith(sent) or not whole.endswith(tail.text):
            return "the chat template writes earlier turns otherwise when the conversation goes on"
        message = conversation[answer]
        between = whole[len(sent) : len(whole) - len(tail.text)]
        values = [str(value) for call in message.tool_calls for value in (call.parsed or {}).values()]
        if not all(part in between for part in (message.reasoning, message.content, *values)):
            return "the chat template leaves out parts of earlier answers"
    return ""


# Single properties ----------------------------------------------------------------------------------------------------


def _written(text: TemplateText, messages: Sequence[Message], *, opened: bool) -> str:
    """Empty: refused."""
    try:
        return text.write(messages, (), opened=opened)
    except DataError:
        return ""


def _tail(behind: Behind, *new: Message) -> str:
    try:
        return behind.tail([QUESTION, _made(1, calls=1 if new[0].role is Role.TOOL else 0)], new, ()).text
    except (DataError, NotAppendableError):
        return ""


def _openers(behind: Behind | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Only of templates whose turns have no end of their own; elsewhere what comes first is that end."""
    if behind is None or behind.alone:
        return frozenset()
    tails = (_tail(behind, _said(Role.USER, 2)), _tail(behind, *_results(1, 1)), _tail(behind, _said(Role.SYSTEM, 2)))
    return frozenset(token_id for tail in tails for token_id in tokenizer.encode(tail)[:1])


def _turn_end(behind: Behind | None, tokenizer: Tokenizer) -> str:
    if behind is None:
        return ""
    followed = _tail(behind, _said(Role.USER, 2))
    length = 0
    while followed[: length + 1] == behind.alone[: length + 1] and length < len(behind.alone):
        length += 1
    first = tokenizer.encode(followed)[:1]
    return behind.alone[:length] if length == len(behind.alone) else "".join(map(tokenizer.decode_token, first))


def _added(text: TemplateText, closed: str, begin: str) -> str:
    """What stands in front of a conversation beyond the opening of its first message, as another message has it."""
    two = _written(text, [QUESTION, Message(role=Role.ASSISTANT, content=MARK), _said(Role.USER, 2)], opened=False)
    between = two.rpartition(MARK)[2].partition("fathomword2")[0]
    front = closed.rpartition(QUESTION.content)[0].removeprefix(begin)
    length = 0
    while length < min(len(front), len(between)) and front[-1 - length] == between[-1 - length]:
        length += 1
    return front[: len(front) - length]


def _strips(text: TemplateText, role: Role) -> bool:
    word = Message(role=role, content="  fathomword  ")
    messages = {Role.SYSTEM: [word, QUESTION], Role.USER: [word], Role.ASSISTANT: [QUESTION, word, QUESTION]}[role]
    written = _written(text, messages, opened=False)
    return "fathomword" in written and "  fathomword  " not in written


def _between_results(text: TemplateText) -> str:
    if not text.calls_as:
        return ""
    two = _written(text, [QUESTION, _made(1, calls=2), *_results(1, 2)], opened=False)
    return two.partition("fathomresult10")[2].partition("fathomresult11")[0]
