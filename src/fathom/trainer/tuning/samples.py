"""What is trained on, ready for a forward. Each sample is trained whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fathom.core.errors import RecordError
from fathom.core.records.demonstration import Demonstration


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to imitate."""

    rows: tuple[Demonstration, ...]
    """Its sequences, at least one; each answer has loss in exactly one."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise RecordError("a conversation without a row has nothing to imitate")

    @property
    def tokens(self) -> int:
        """Of all rows, context included."""
        return _tokens(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.token_ids) for row in self.rows)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt."""

    chosen: tuple[Demonstration, ...]
    """Rows of the better one, with loss on the answer alone."""
    rejected: tuple[Demonstration, ...]
    """Rows of the worse one."""

    def __post_init__(self) -> None:
        if not self.chosen or not self.rejected:
            raise RecordError("a pair has two sides with at least one row each")

    @property
    def rows(self) -> tuple[Demonstration, ...]:
        """The chosen rows, then the rejected."""
        return (*self.chosen, *self.rejected)

    @property
    def tokens(self) -> int:
        """Of all rows, context included."""
        return _tokens(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.token_ids) for row in self.rows)


Sample = Conversation | Pair
"""What is trained whole or not at all."""


def loss_tokens(rows: tuple[Demonstration, ...]) -> int:
    """Tokens with loss of some rows."""
    return sum(int(row.loss_mask.sum()) for row in rows)


def _tokens(rows: tuple[Demonstration, ...]) -> int:
    return sum(len(row.token_ids) for row in rows)
