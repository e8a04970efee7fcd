"""Conversations to imitate: their ids and which of them the model would have sampled, found by construction.

    render(up to the first answer)  answer  extend(up to the next)  answer ...
    no loss                         loss    no loss                 loss

Nothing is decoded, searched for or encoded again: each answer is spliced behind what a session would have been sent, so
that the row is the one that a session leaves in which the model has said exactly this. Where a session would have
rendered its context as a whole (the template deletes earlier thoughts, say), another row begins.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import numpy as np

from fathom.core.errors import DataError, NotAppendableError
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.message import Message, Role, Tool


class ConversationRenderer(Protocol):
    """Messages to ids, piece by piece. See `TurnRenderer` and `PlainRenderer`."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """int32 [P]: a whole conversation, opened for the assistant's answer."""
        ...

    def extend(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], last_token: int | None
    ) -> np.ndarray:
        """int32 [R]: what goes behind an answer, up to the next. Raises NotAppendableError."""
        ...

    def answer(self, before: Sequence[Message], said: Message, tools: Sequence[Tool]) -> np.ndarray:
        """int32 [A]: an answer, with the token that ends it."""
        ...


def demonstrations(
    renderer: ConversationRenderer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    source: str,
    untrained: Set[int] = frozenset(),
) -> tuple[Demonstration, ...]:
    """The rows of a conversation, at least one; each answer of the assistant has loss in exactly one of them.

    Args:
        renderer: how the model's conversations are written.
        messages: the conversation. What stands behind its last answer is left out.
        tools: what the assistant could call.
        source: where it came from, for people.
        untrained: places of answers that are context alone.

    Raises:
        DataError: it has no answer to imitate, an answer is empty, two follow each other, or nothing is in front of
            the first; or as `TurnRenderer.render` and `TurnRenderer.answer`.
    """
    rows: list[_Row] = []
    answered = 0
    for place, said in enumerate(messages):
        if said.role is not Role.ASSISTANT:
            continue
        _check(messages, place)
        before, new = messages[:place], messages[answered:place]
        row = _extended(renderer, rows[-1], messages[:answered], new, tools) if rows else None
        if row is None:
            row = _Row()
            row.add(renderer.render(before, tools), trained=False)
            rows.append(row)
        row.add(renderer.answer(before, said, tools), trained=place not in untrained)
        answered = place + 1
    made = [row.demonstration(source) for row in rows if row.is_trained]
    if not made:
        raise DataError("the conversation has no answer of the assistant to imitate")
    return tuple(made)


class _Row:
    """Tokens of one row."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._trained: list[bool] = []

    @property
    def last_token(self) -> int:
        return int(self._parts[-1][-1])

    @property
    def is_trained(self) -> bool:
        return any(self._trained)

    def add(self, token_ids: np.ndarray, *, trained: bool) -> None:
        self._parts.append(token_ids)
        self._trained.append(trained)

    def demonstration(self, source: str) -> Demonstration:
        return Demonstration(
            token_ids=np.concatenate(self._parts, dtype=np.int32),
            loss_mask=np.repeat(self._trained, [len(part) for part in self._parts]),
            source=source,
        )


def _extended(
    renderer: ConversationRenderer,
    row: _Row,
    before: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
) -> _Row | None:
    """The row with what was said since its last answer. None: by the template it cannot go on."""
    try:
        row.add(renderer.extend(before, new, tools, row.last_token), trained=False)
    except NotAppendableError:
        return None
    return row


def _check(messages: Sequence[Message], place: int) -> None:
    said = messages[place]
    if place == 0:
        raise DataError("the conversation begins with the assistant; a model answers only what was said before")
    if messages[place - 1].role is Role.ASSISTANT:
        raise DataError(f"messages {place} and {place + 1} are both the assistant's; join them")
    if not (said.content.strip() or said.tool_calls):
        raise DataError(f"message {place + 1}, of the assistant, is empty")
