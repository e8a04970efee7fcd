"""What vLLM's server says, as far as it is read here, and what its worker is told."""

from __future__ import annotations

import msgspec

from fathom.core.ids import EngineId
from fathom.core.manifest import WeightSource


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability under the processed distribution; -9999 stands for minus infinity."""

    token_id: int
    """The token."""
    logprob: float
    """Nats."""


class SampledLogprob(msgspec.Struct, frozen=True):
    """The sampled token at one place, and the likeliest ones there."""

    token_id: int
    """The token."""
    logprob: float
    """Nats."""
    rank: int | None = None
    """How many are likelier, and 1. None: its log-probability is no number."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """As many as were asked for, the sampled one first."""


class Logprobs(msgspec.Struct, frozen=True):
    """Of the tokens of one event."""

    content: tuple[SampledLogprob, ...] | None = None
    """One for each token."""


class Span(msgspec.Struct, frozen=True):
    """Sampled tokens of one version."""

    version: str
    """Its label."""
    start: int
    """First token."""
    end: int
    """One past the last."""


class Choice(msgspec.Struct, frozen=True):
    """New tokens of the generation, or all of them."""

    token_ids: tuple[int, ...] | None = None
    """The tokens."""
    logprobs: Logprobs | None = None
    """Their log-probabilities."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`. None: it goes on."""
    weight_versions: tuple[Span, ...] | None = None
    """Of the whole generation, when it has ended."""


class PromptDetails(msgspec.Struct, frozen=True):
    """About the prompt."""

    cached_tokens: int | None = None
    """Tokens from the prefix cache."""


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens_details: PromptDetails | None = None
    """About the prompt."""


class ServerError(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    """In words."""
    code: int | None = None
    """HTTP status."""


class Answer(msgspec.Struct, frozen=True):
    """One event of a stream, or a whole answer."""

    choices: tuple[Choice, ...] = ()
    """At most one."""
    usage: Usage | None = None
    """At the end of a stream."""
    prompt_logprobs: tuple[dict[int, PromptLogprob] | None, ...] | None = None
    """By position and token; the first position has none."""
    error: ServerError | None = None
    """Instead of everything else."""


class PromptLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a prompt token."""

    logprob: float
    """Nats."""


class Facts(msgspec.Struct, frozen=True):
    """What the worker extension says about the server it is in."""

    protocol: int
    """Version of what it and the adapter say to each other."""
    vllm: str
    """vLLM's version."""
    dtype: str
    """Element type of the weights."""
    vocab_size: int
    """Rows of the output head."""
    max_model_len: int
    """Longest sequence."""
    max_running: int
    """Sequences in one batch."""
    max_logprobs: int
    """Largest number of likeliest tokens it returns. -1: no limit."""
    compiled: bool
    """The model is compiled."""
    weight_transfer: str
    """Its weight-transfer backend. Empty: none."""
    world_size: int
    """Processes that share the model."""
    threads: int
    """Threads that compute."""


class StageOrder(msgspec.Struct, frozen=True):
    """What the worker extension is told to receive."""

    engine: EngineId
    """Whose worker it is."""
    source: WeightSource
    """Where it is."""
    entries: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """Name, element type, shape, offset and bytes of each tensor in the flat layout, ordered by name."""
    buckets: tuple[tuple[int, int], ...]
    """First byte, and the byte after the last, of what is broadcast at once, in order. Empty: nothing is."""


class StagedFacts(msgspec.Struct, frozen=True):
    """What the worker extension says about the version it was told to receive."""

    busy: bool
    """It is still being received."""
    failure: str
    """Why it could not be."""
    interrupted: bool
    """It broke elsewhere: nothing is wrong with the version, nor with the worker."""
    digest: str
    """Root digest of the bytes received. Empty: nothing whole is staged."""
    checksums: dict[str, str]
    """BLAKE3 of each tensor received."""
    moved_bytes: int
    """Bytes that came from the source."""
    receive_s: float
    """Seconds to receive."""
    verify_s: float
    """Seconds to digest."""
