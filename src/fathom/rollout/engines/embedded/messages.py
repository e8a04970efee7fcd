"""What the embedded engine's process and its client say to each other, besides the records of the port.

Every body is one frame of `core/wire.py`, or a stream of them. A call that fails is answered by a `Failure` frame.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fathom.config.families import Speculation
from fathom.core.adapter import AdapterForm
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    GenerateChunk,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
)
from fathom.core.records.sampling import InFlightMode

FRAMES = "application/x-fathom-frames"
"""Media type of every answer."""


def adapter_path(name: str) -> str:
    """Below which path the engine of the adapter called `name` answers."""
    return f"/adapters/{name}"


class FailureKind(StrEnum):
    """Which error the client raises."""

    REFUSED = "refused"
    """Understood, and will not be served."""
    INTERRUPTED = "interrupted"
    """A transfer broke elsewhere: try again."""
    FAILED = "failed"
    """Something went wrong."""


class Failure(msgspec.Struct, frozen=True, tag="engine_failure.1"):
    """Why there is no answer, or no further one."""

    kind: FailureKind
    """Refused or failed."""
    reason: str
    """What happened and what to do next."""


class SubmitCall(msgspec.Struct, frozen=True, tag="submit_call.1"):
    """Generate and score. Requests share the way, nothing else: each is refused, fails and ends by itself.

    Answered by a stream of `StreamFrame`, over when every one of them has ended.
    """

    requests: tuple[GenerateRequest | ScoreRequest, ...]
    """Which ones; no id twice."""


class RequestFailure(msgspec.Struct, frozen=True, tag="request_failure.1"):
    """The last that is heard of one request of a call."""

    request_id: str
    """Which one."""
    failure: Failure
    """Why there is no answer, or no further chunk."""


class Scored(msgspec.Struct, frozen=True, tag="scored.1"):
    """The answer to one scoring of a call."""

    request_id: str
    """Which one."""
    result: ScoreResult
    """The answer."""


class StreamFrame(msgspec.Struct, frozen=True, tag="stream_frame.1"):
    """What was ready at one moment, of any of the requests of a call."""

    parts: tuple[GenerateChunk | Scored | RequestFailure, ...]
    """In order; each names its request."""


class AbortCall(msgspec.Struct, frozen=True, tag="abort_call.1"):
    """End generations early."""

    request_ids: tuple[str, ...]
    """Which ones."""


class StageCall(msgspec.Struct, frozen=True, tag="stage_call.1"):
    """Receive a version."""

    manifest: Manifest
    """What it consists of."""
    source: WeightSource
    """Where its bytes lie."""


class VerifyCall(msgspec.Struct, frozen=True, tag="verify_call.1"):
    """Digest what is staged."""


class CommitCall(msgspec.Struct, frozen=True, tag="commit_call.1"):
    """Serve what is staged."""

    version: PolicyVersion
    """What the caller believes to be staged."""
    mode: InFlightMode
    """What happens to running generations."""
    deadline_s: float
    """A drain that has not ended by then is withdrawn: the old version goes on."""


class RollbackCall(msgspec.Struct, frozen=True, tag="rollback_call.1"):
    """Forget what is staged."""


class StatusCall(msgspec.Struct, frozen=True, tag="status_call.1"):
    """Look at the engine."""


class Done(msgspec.Struct, frozen=True, tag="done.1"):
    """Done; there is nothing to tell."""


class EngineConfigLine(msgspec.Struct, frozen=True, tag="engine_config.2"):
    """First line (JSON) on the process's standard input, which then stays open: when it closes, the process ends."""

    engine: str
    """Its name in records."""
    model_folder: str
    """Hugging Face folder of the model; its weights serve nothing until a version is committed."""
    dtype: str
    """Element type of weights and KV: `float32` or `bfloat16`."""
    device: str
    """Torch device."""
    threads: int
    """CPU threads of torch."""
    max_running: int
    """Sequences decoded in one batch."""
    step_tokens: int | None
    """Tokens of one forward at most. None: 512, or twice `max_running` if that is more."""
    kv_memory_mb: int | None
    """Memory for keys and values, in MiB. None: what `max_running` longest sequences need, up to 4 GiB."""
    max_context_tokens: int
    """Longest sequence, prompt and sampled."""
    adapters: tuple[AdapterForm, ...]
    """Compute with adapters of these forms beside the folder's weights; a version is that alone. Each is an engine of
    its own below the path `/adapters/NAME`; a single one is at the root, too. Empty: a version is the whole model."""
    aligned: bool
    """Compute in aligned mode (`model/aligned.py`)."""
    speculation: Speculation
    """Who drafts tokens."""
    draft_tokens: int
    """Tokens drafted at once for a sequence, at most."""
    draft_model_folder: str | None
    """Hugging Face folder of the model that drafts. None: no model does."""
    host: str
    """Interface to listen on."""
    port: int
    """Port to listen on. 0: any free one."""
    token: str
    """Bearer token that every call must carry."""


class ReadyLine(msgspec.Struct, frozen=True, tag="engine_ready.1"):
    """The one line (JSON) on standard output, once the process listens and its model is loaded."""

    port: int
    """The port it listens on."""
    capabilities: Capabilities
    """What it can do."""


class CannotStartLine(msgspec.Struct, frozen=True, tag="engine_cannot_start.1"):
    """The one line (JSON) on standard output of a process that cannot start as configured."""

    reason: str
    """What is wrong and what to change."""


StartLine = ReadyLine | CannotStartLine
Streamed = GenerateChunk | Scored | RequestFailure
