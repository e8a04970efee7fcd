"""Numbers added to logits, and the record of which tokens were sampled with them. Letters: N tokens, M entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from fathom.core.errors import RecordError

LARGEST = 100.0
"""Serving engines clamp a bias to this size, some of them silently; more than this is refused instead."""


class LogitBias(msgspec.Struct, frozen=True, tag="logit_bias.1"):
    """What is added to the logits of some tokens, as float32, before the temperature divides them."""

    ids: tuple[int, ...]
    """Token ids, at least one, ascending."""
    values: tuple[float, ...]
    """What each of them gets, within [-100, 100]."""

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.values):
            raise ValueError(f"a logit bias needs one value per id, at least one; got {self.ids} and {self.values}")
        if self.ids[0] < 0 or any(left >= right for left, right in zip(self.ids, self.ids[1:], strict=False)):
            raise ValueError(f"the ids of a logit bias must be ascending and >= 0, got {self.ids}")
        if not all(abs(value) <= LARGEST for value in self.values):
            raise ValueError(f"the values of a logit bias must be within [-{LARGEST:g}, {LARGEST:g}]: {self.values}")


class TokenBias(msgspec.Struct, frozen=True, tag="token_bias.1"):
    """Which bias each of N tokens was sampled with. Tokens share few biases, so each is kept once."""

    biases: tuple[LogitBias, ...]
    """The biases in use, at least one."""
    which: np.ndarray
    """int32 [N]: index of a token's bias; -1: it had none."""

    @classmethod
    def of(cls, biases: Sequence[LogitBias | None]) -> Self | None:
        """From the bias of each token. None: no token has one."""
        used = tuple(dict.fromkeys(bias for bias in biases if bias is not None))
        if not used:
            return None
        index = {bias: place for place, bias in enumerate(used)}
        return cls(biases=used, which=np.array([-1 if bias is None else index[bias] for bias in biases], np.int32))

    def check(self, count: int) -> None:
        """Raises `RecordError` unless this is of `count` tokens and whole."""
        if self.which.dtype != np.int32 or self.which.shape != (count,) or not self.biases:
            raise RecordError(f"biases must be int32 [{count}], got {self.which.dtype} {self.which.shape}")
        if count and not -1 <= self.which.min() <= self.which.max() < len(self.biases):
            raise RecordError("a token names a bias that is not there")

    def select(self, positions: np.ndarray) -> TokenBias | None:
        """The biases of a subset of the tokens, in the given order. None: none of them has one."""
        which = self.which[positions]
        return TokenBias(biases=self.biases, which=which) if bool(np.any(which >= 0)) else None

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All of it, sparse: int64 [M] tokens, int64 [M] ids, float32 [M] values."""
        tokens = [np.flatnonzero(self.which == index) for index in range(len(self.biases))]
        ids = [np.array(bias.ids, np.int64) for bias in self.biases]
        values = [np.array(bias.values, np.float32) for bias in self.biases]
        return (
            np.concatenate([np.repeat(rows, len(own)) for rows, own in zip(tokens, ids, strict=True)]),
            np.concatenate([np.tile(own, len(rows)) for rows, own in zip(tokens, ids, strict=True)]),
            np.concatenate([np.tile(own, len(rows)) for rows, own in zip(tokens, values, strict=True)]),
        )


def join_biases(parts: Sequence[TokenBias | None], counts: Sequence[int]) -> TokenBias | None:
    """The biases of `parts`, of `counts` tokens each, end to end. None: no token has one."""
    biases = tuple(dict.fromkeys(bias for part in parts if part is not None for bias in part.biases))
    if not biases:
        return None
    index = {bias: place for place, bias in enumerate(biases)}
    which = [
        np.full(count, -1, np.int32)
        if part is None
        else np.array([*(index[bias] for bias in part.biases), -1], np.int32)[part.which]
        for part, count in zip(parts, counts, strict=True)
    ]
    return TokenBias(biases=biases, which=np.concatenate(which))
