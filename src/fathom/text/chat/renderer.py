"""Messages to token ids, by the model's own template; and what goes behind a sampled answer, found by probing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.errors import ConfigError, DataError, NotAppendableError
from fathom.core.records.message import Message, Role, Tool
from fathom.text.chat.behind import Behind
from fathom.text.chat.properties import TemplateProperties, probe
from fathom.text.chat.template_text import TemplateText
from fathom.text.chat.uses import use_of
from fathom.text.tokenizer import Tokenizer

_QUESTION = Message(role=Role.USER, content="fathomquestion")


@final
class TurnRenderer:
    """Renders conversations, whole or what is new of them. Letters: P prompt tokens, R tokens appended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer has no chat template, or one that cannot write a conversation."""
        if tokenizer.template is None:
            raise ConfigError("the model folder has no chat template; agents need one: choose an instruct model")
        self._tokenizer = tokenizer
        self._text = TemplateText(tokenizer.template, tokenizer.special.texts)
        if _QUESTION.content not in self._text.write([_QUESTION], (), opened=True):
            raise ConfigError("the chat template does not write what a user says; is it a chat template?")
        self._behind = _behind(self._text, tokenizer)
        self.properties: TemplateProperties = probe(self._text, self._behind, tokenizer)
        """What was found out about the template."""

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

        With what was rendered and sampled before, it is what a full render gives, but for how the answer was written:
        sampled ids stay as they are, also the one that ended it, in whose place another may be written.

        Args:
            before: the conversation, the sampled answer being its last message, with what was thought.
            new: what was said since, at least one message; no assistant.
            tools: as in `render`.
            last_token: the last sampled id. None: nothing was sampled.

        Raises:
            NotAppendableError: by this template the conversation can only be rendered as a whole.
            DataError: the template refuses it.
        """
        behind = self._behind
        if behind is None:
            raise NotAppendableError("the chat template does not write an answer behind a question")
        for use in use_of(before, new):
            reason = self.properties.uses[use]
            if reason:
                raise NotAppendableError(f"{reason} ({use.value})")
        tail = behind.tail(before, new, tools)
        ids = self._tokenizer.encode(tail.text)
        return np.array(ids[self._sampled(ids, tail.end_tokens, last_token) :], dtype=np.int32)

    def answer(self, before: Sequence[Message], said: Message, tools: Sequence[Tool]) -> np.ndarray:
        """int32 [A]: an answer as a model of this template would sample it behind `render` or `extend`, its end too.

        It is what the template writes behind the opened prompt. Its ids are those of that text behind such an opening,
        never of a text that reaches across the seam.

        Args:
            before: the conversation up to it.
            said: the answer.
            tools: as in `render`.

        Raises:
            DataError: the template refuses it, leaves out part of it, or writes it otherwise than it opens an answer;
                or a token that ends a turn is in the middle of it.
            ConfigError: no token is known to end an answer.
        """
        if self._behind is None:
            raise DataError("the chat template does not write an answer behind a question")
        if len(said.tool_calls) > 1 and not self._text.calls_at_once:
            raise DataError("the chat template writes one tool call a message; give each call a message of its own")
        opened = self._text.write(before, tools, opened=True)
        written = self._text.write([*before, said], tools, opened=False)
        if not written.startswith(opened):
            raise DataError(
                f"the chat template opens an answer with {opened[-40:]!r} and then writes this one otherwise"
            )
        body = written[len(opened) :]
        parts = (said.content.strip(), said.reasoning.strip(), *(call.name for call in said.tool_calls))
        if left_out := [part for part in parts if part not in body]:
            raise DataError(f"the chat template leaves out or alters part of an answer: {left_out[0][:60]!r}")
        return np.array(self._ended(body, said, self._behind), dtype=np.int32)

    def _ended(self, body: str, said: Message, behind: Behind) -> list[int]:
        """Ids of an answer up to the token that ends it."""
        stops = self._tokenizer.special.stop_ids
        ids = self._in_context(body)
        places = [place for place, token_id in enumerate(ids) if token_id in stops]
        if places:
            rest = "".join(map(self._tokenizer.decode_token, ids[places[0] + 1 :]))
            if rest.strip():
                ends = self._tokenizer.decode_token(ids[places[0]])
                raise DataError(f"{ends}, which ends a turn, stands in the middle of an answer, before {rest[:40]!r}")
            return ids[: places[0] + 1]
        if not body.endswith(behind.alone):
            raise DataError("where this answer ends cannot be told from the chat template")
        return [*self._in_context(body[: len(body) - len(behind.alone)]), self._end_of(behind, bool(said.tool_calls))]

    def _end_of(self, behind: Behind, calls: bool) -> int:
        """What is sampled where the template writes no stop token: one that opens the next message, else the eos."""
        special = self._tokenizer.special
        opener = behind.opener(calls=calls)
        if opener in special.stop_ids:
            return opener
        if special.eos_id is None:
            raise ConfigError("the tokenizer names no eos_token, so no answer can show where it ends")
        return special.eos_id

    def _in_context(self, body: str) -> list[int]:
        """Ids of a text behind an opened prompt: some tokenizers write the beginning of a text otherwise."""
        lead = self.properties.opens_with
        opened, whole = self._tokenizer.encode(lead), self._tokenizer.encode(lead + body)
        return whole[len(opened) :] if whole[: len(opened)] == opened else self._tokenizer.encode(body)

    def _sampled(self, ids: Sequence[int], end_tokens: int, last_token: int | None) -> int:
        """How many of `ids` were sampled already, or another in their place."""
        stops = self._tokenizer.special.stop_ids
        if last_token is None or not ids:
            return 0
        if end_tokens:
            return end_tokens if last_token in stops or last_token == ids[end_tokens - 1] else 0
        if last_token == ids[0]:
            return 1
        if last_token in self.properties.openers and last_token in stops:
            opened = self._tokenizer.decode_token(last_token)
            raise NotAppendableError(
                f"the answer ended with {opened}, which opens another turn than the one that follows"
            )
        return 0


def _behind(text: TemplateText, tokenizer: Tokenizer) -> Behind | None:
    """None: nothing can be appended with this template."""
    try:
        return Behind(text, tokenizer)
    except (DataError, NotAppendableError):
        return None
