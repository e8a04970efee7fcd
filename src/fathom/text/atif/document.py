"""An ATIF document (Agent Trajectory Interchange Format, versions 1.0 to 1.8), as typed as its schema says.

Unknown fields are refused. What the schema leaves to its readers is checked here, where a document is built: lengths of
what is aligned by token, the order of steps, and which step may hold what. The schema is one for all versions, as in
Harbor's own models; later versions only add fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fathom.core.errors import DataError

Version = Literal[
    "ATIF-v1.0",
    "ATIF-v1.1",
    "ATIF-v1.2",
    "ATIF-v1.3",
    "ATIF-v1.4",
    "ATIF-v1.5",
    "ATIF-v1.6",
    "ATIF-v1.7",
    "ATIF-v1.8",
]
Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Extra = dict[str, Any]


class ImageSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where an image is."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    """Its format."""
    path: str
    """A path or URL."""


class AudioSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a sound is."""

    media_type: Annotated[str, Meta(pattern="^audio/")]
    """Its format."""
    path: str
    """A path or URL."""
    duration_sec: Annotated[float, Meta(ge=0)] | None = None
    """How long it is. None: not said."""


class TextPart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="text",
):
    """Text among other content."""

    text: str
    """The text."""


class ImagePart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="image",
):
    """An image among other content."""

    source: ImageSource
    """Where it is."""


class AudioPart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag="audio",
):
    """A sound among other content."""

    source: AudioSource
    """Where it is."""


Content = str | list[TextPart | ImagePart | AudioPart]
"""Text, or parts of several kinds."""


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who acted."""

    name: str
    """The agent."""
    version: str
    """Its version."""
    model_name: str | None = None
    """Its model, where a step does not say otherwise. None: not said."""
    tool_definitions: list[Extra] | None = None
    """Tools that it had, as OpenAI's API takes them. None: not said."""
    extra: Extra | None = None
    """Anything else."""


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool was asked for."""

    tool_call_id: str
    """Names the call; unique in its step."""
    function_name: str
    """The tool."""
    arguments: Extra
    """What it was given."""
    extra: Extra | None = None
    """Anything else."""


class SubagentRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Work that was handed to another agent. One of the first two says where its trajectory is."""

    trajectory_id: str | None = None
    """A document in `subagent_trajectories`."""
    trajectory_path: str | None = None
    """A file."""
    session_id: str | None = None
    """Its run, for people."""
    extra: Extra | None = None
    """Anything else."""

    def __post_init__(self) -> None:
        if self.trajectory_id is None and self.trajectory_path is None:
            raise ValueError("a reference to a sub-agent needs trajectory_id or trajectory_path")


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What came back."""

    source_call_id: str | None = None
    """The call that it answers. None: it answers none."""
    content: Content | None = None
    """What it says. None: nothing."""
    subagent_trajectory_ref: list[SubagentRef] | None = None
    """Who else worked on it."""
    extra: Extra | None = None
    """Anything else."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the world answered to a step."""

    results: list[Result]
    """Its parts."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of the model, in tokens. Aligned: `completion_token_ids` and `logprobs`."""

    prompt_tokens: Count | None = None
    """Tokens sent, cached ones included."""
    completion_tokens: Count | None = None
    """Tokens sampled."""
    cached_tokens: Count | None = None
    """Of the tokens sent, those from a prefix cache."""
    cost_usd: float | None = None
    """What it cost."""
    prompt_token_ids: list[TokenId] | None = None
    """Tokens sent, history included."""
    completion_token_ids: list[TokenId] | None = None
    """Tokens sampled."""
    logprobs: list[float] | None = None
    """Log-probability of each sampled token."""
    extra: Extra | None = None
    """Anything else."""

    def __post_init__(self) -> None:
        for name, ids, count in (
            ("prompt_token", self.prompt_token_ids, self.prompt_tokens),
            ("completion_token", self.completion_token_ids, self.completion_tokens),
        ):
            if ids is not None and count is not None and len(ids) != count:
                raise ValueError(f"{name}_ids has {len(ids)} ids, and {name}s says {count}")
        sampled = self.completion_tokens if self.completion_token_ids is None else len(self.completion_token_ids)
        if self.logprobs is not None and sampled is not None and len(self.logprobs) != sampled:
            raise ValueError(f"logprobs has {len(self.logprobs)} entries for {sampled} completion tokens")
        if self.logprobs is not None and not all(map(math.isfinite, self.logprobs)):
            raise ValueError("logprobs must be finite")
        sent = self.prompt_tokens if self.prompt_token_ids is None else len(self.prompt_token_ids)
        if self.cached_tokens is not None and sent is not None and self.cached_tokens > sent:
            raise ValueError(f"cached_tokens is {self.cached_tokens} of {sent} prompt tokens")


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message, and what came of it."""

    step_id: int
    """1, 2, 3, ..."""
    source: Literal["system", "user", "agent"]
    """Who speaks."""
    message: Content
    """What is said; may be empty."""
    timestamp: str | None = None
    """When, in ISO 8601."""
    model_name: str | None = None
    """The model. None: the document's."""
    reasoning_effort: str | float | None = None
    """How much it was asked to think."""
    reasoning_content: str | None = None
    """What it thought."""
    tool_calls: list[Call] | None = None
    """Tools that it asked for."""
    observation: Observation | None = None
    """What came back."""
    metrics: Metrics | None = None
    """The call of the model."""
    is_copied_context: bool | None = None
    """True: it stands here as context, and must not be trained."""
    llm_call_count: Count | None = None
    """Calls of the model that it holds. 0: it was not made by a model. None: not said."""
    extra: Extra | None = None
    """Anything else."""

    def __post_init__(self) -> None:
        of_agents = {
            "model_name": self.model_name,
            "reasoning_effort": self.reasoning_effort,
            "reasoning_content": self.reasoning_content,
            "tool_calls": self.tool_calls,
            "metrics": self.metrics,
        }
        given = [name for name, value in of_agents.items() if value is not None]
        if self.source != "agent" and given:
            raise ValueError(f"only steps of the agent have {', '.join(given)}; this step's source is {self.source}")
        if self.llm_call_count == 0 and (self.metrics is not None or self.reasoning_content is not None):
            raise ValueError("a step with llm_call_count 0 was made by no model: it has no metrics and no reasoning")
        if self.timestamp is not None:
            datetime.fromisoformat(self.timestamp)
        names = [call.tool_call_id for call in self.tool_calls or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"two calls of step {self.step_id} have one tool_call_id")
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in names:
                raise ValueError(f"source_call_id {result.source_call_id!r} names no call of step {self.step_id}")


class FinalMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sums over a document."""

    total_prompt_tokens: Count | None = None
    """Tokens sent, cached ones included."""
    total_completion_tokens: Count | None = None
    """Tokens sampled."""
    total_cached_tokens: Count | None = None
    """Tokens from a prefix cache."""
    total_cost_usd: float | None = None
    """Cost."""
    total_steps: Count | None = None
    """Steps. Another number than the document has must be explained in its `notes`."""
    extra: Extra | None = None
    """Anything else."""


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One trajectory."""

    schema_version: Version
    """Version of the format."""
    agent: Agent
    """Who acted."""
    steps: Annotated[list[Step], Meta(min_length=1)]
    """What happened."""
    session_id: str | None = None
    """The run that it is part of."""
    trajectory_id: str | None = None
    """Names this document."""
    notes: str | None = None
    """For people."""
    final_metrics: FinalMetrics | None = None
    """Sums."""
    continued_trajectory_ref: str | None = None
    """The file that goes on from it."""
    subagent_trajectories: list[Document] | None = None
    """Those of its sub-agents, each with a `trajectory_id` of its own."""
    extra: Extra | None = None
    """Anything else."""

    def __post_init__(self) -> None:
        for place, step in enumerate(self.steps, 1):
            if step.step_id != place:
                raise ValueError(f"step ids count 1, 2, 3, ...: the {place}. step has step_id {step.step_id}")
        names = [each.trajectory_id for each in self.subagent_trajectories or ()]
        if None in names or len(set(names)) != len(names):
            raise ValueError("each of subagent_trajectories needs a trajectory_id of its own")
        total = self.final_metrics.total_steps if self.final_metrics else None
        if total is not None and total != len(self.steps) and not self.notes:
            raise ValueError(f"total_steps is {total} and there are {len(self.steps)} steps; notes must say why")

    @property
    def with_subagents(self) -> Iterator[Document]:
        """It, and all that are in it."""
        yield self
        for each in self.subagent_trajectories or ():
            yield from each.with_subagents


_DECODER = msgspec.json.Decoder(Document)


def decode(text: bytes, source: str) -> Document:
    """Read a document. Raises DataError, which names `source`, the place and what is wrong there."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{source} is no ATIF document: {error}") from None


def encode(document: Document) -> bytes:
    """Write a document, indented; fields that say nothing are left out."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def read_file(path: Path) -> Document:
    """Read a file. Raises DataError as `decode`, or when there is none."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
