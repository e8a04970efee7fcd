"""Conversations of models that have no chat template: the contents, joined; an answer ends with the eos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.errors import ConfigError, DataError
from fathom.core.records.message import Message, Role, Tool
from fathom.text.tokenizer import Tokenizer


@final
class PlainRenderer:
    """See `demonstrations.ConversationRenderer`. A prompt is what `ChatRenderer` without a template makes of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer names no token that ends an answer."""
        if tokenizer.special.eos_id is None:
            raise ConfigError("the tokenizer names no eos_token, so no answer can show where it ends")
        self._tokenizer = tokenizer
        self._end = tokenizer.special.eos_id

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """int32 [P]: what the tokenizer puts in front of plain text, then the contents; answers have their end.

        Raises:
            DataError: tools are given, or nothing is left to send.
        """
        _refuse_tools(messages, tools)
        ids = [] if self._tokenizer.special.bos_id is None else [self._tokenizer.special.bos_id]
        said = ""
        for message in messages:
            said += message.content
            if message.role is Role.ASSISTANT:
                ids += [*self._tokenizer.encode(said), self._end]
                said = ""
        ids += self._tokenizer.encode(said)
        if not ids:
            raise DataError("a prompt is empty; a model needs at least one token to go on from")
        return np.array(ids, dtype=np.int32)

    def extend(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], last_token: int | None
    ) -> np.ndarray:
        """int32 [R]: the new contents, behind the end of the answer if that was not sampled."""
        _refuse_tools(new, tools)
        end = [] if last_token == self._end else [self._end]
        return np.array([*end, *self._tokenizer.encode("".join(each.content for each in new))], dtype=np.int32)

    def answer(self, before: Sequence[Message], said: Message, tools: Sequence[Tool]) -> np.ndarray:
        """int32 [A]: its content and the eos. Raises DataError: it thinks or calls tools."""
        _refuse_tools([said], tools)
        if said.reasoning:
            raise DataError("thoughts need a chat template, and this model has none")
        return np.array([*self._tokenizer.encode(said.content), self._end], dtype=np.int32)


def _refuse_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    if tools or any(message.tool_calls or message.role is Role.TOOL for message in messages):
        raise DataError("tools need a chat template, and this model has none")
