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
