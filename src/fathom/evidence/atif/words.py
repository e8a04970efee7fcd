"""What token ids say, for people. The ids are what counts; this is how they read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import final

import msgspec

from fathom.core.errors import ConfigError
from fathom.core.records.message import Message, Role, Tool
from fathom.core.records.sampling import FinishReason
from fathom.text.chat.reading.readers import TurnReaders
from fathom.text.chat.renderer import TurnRenderer
from fathom.text.tokenizer import Tokenizer

_ANY_TOOL = (Tool(name="", description="", parameters=msgspec.Raw(b"{}")),)
"""The ledger does not keep which tools there were: marks of calls are looked for, whatever they name."""


@final
class Words:
    """Reads with the tokenizer of a run. Without one, everything is empty."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the tokenizer's. None: the run has kept none."""
        self._tokenizer = None if folder is None else Tokenizer.load(folder)
        self._readers = None if self._tokenizer is None else _readers(self._tokenizer)

    def rendered(self, token_ids: Sequence[int]) -> str:
        """What was written around the answers: all of it, special tokens in their written form."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ""
        runs = groupby(token_ids, key=lambda token_id: tokenizer.special_ids.get(token_id, ""))
        return "".join(mark * len(list(ids)) if mark else tokenizer.decode(list(ids)) for mark, ids in runs)

    def answer(self, token_ids: Sequence[int], finish_reason: FinishReason, turn: str) -> Message:
        """An answer, read as the session of a run reads it: thoughts and calls apart.

        Args:
            token_ids: what was sampled.
            finish_reason: why it ended.
            turn: names the turn; the names of its calls follow from it.
        """
        if self._readers is None:
            text = "" if self._tokenizer is None else self._tokenizer.decode(token_ids)
            return Message(role=Role.ASSISTANT, content=text)
        reader = self._readers.reader(_ANY_TOOL, (), turn)
        reader.feed(token_ids)
        return reader.end(finish_reason)[1]


def _readers(tokenizer: Tokenizer) -> TurnReaders | None:
    """None: there is no chat template, or none that can be taken apart; answers are text then."""
    try:
        properties = TurnRenderer(tokenizer).properties
    except ConfigError:
        return None
    return TurnReaders(tokenizer, properties.calls, properties.thoughts)
