"""What goes wrong in a scripted engine, on demand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Call(StrEnum):
    """A call of the engine port."""

    GENERATE = "generate"
    SCORE = "score"
    STAGE = "stage"
    VERIFY = "verify"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    STATUS = "status"
    """`status` and `health`."""


class Trouble(StrEnum):
    """A way to go wrong."""

    REFUSES = "refuses"
    """Any call: says no."""
    FAILS = "fails"
    """Any call: raises EngineError."""
    HANGS = "hangs"
    """Any call: nothing happens until the deadline."""
    DIES = "dies"
    """Any call: the engine is dead from here on."""
    ONE_LOGPROB_FEWER = "one_logprob_fewer"
    """generate, score."""
    NAN_LOGPROB = "nan_logprob"
    """generate, score."""
    POSITIVE_LOGPROB = "positive_logprob"
    """generate, score."""
    UNKNOWN_VERSION = "unknown_version"
    """generate: tokens of a version that is not named."""
    OTHER_PROMPT = "other_prompt"
    """generate: executed another prompt than it was sent."""
    NO_KEPT_SETS = "no_kept_sets"
    """generate: removed tokens, but does not say which."""
    BREAKS_OFF = "breaks_off"
    """generate: the stream stops without an end."""
    ENDS_TWICE = "ends_twice"
    """generate: a second end after the end."""
    WRONG_DIGEST = "wrong_digest"
    """verify: other bytes than were published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    call: Call
    """In which call."""
    trouble: Trouble
    """How."""
    after_tokens: int = 0
    """generate: once this many tokens were sampled."""
    times: int | None = 1
    """In so many calls, the first ones that match. None: in all."""
    request_id: str | None = None
    """Only in this request. None: in any."""
