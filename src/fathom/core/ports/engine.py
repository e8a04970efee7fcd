"""The engine port: the union of what real engines and all users of one need.

Ids in, ids out. Every ability beyond the least is a declared capability; asking for one an engine lacks is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.records.bias import TokenBias
from fathom.core.records.sampling import FinishReason, InFlightMode, Purpose, SamplingParams
from fathom.core.records.scores import IdLists, IdScores
from fathom.core.records.trajectory import KeptSets


class DigestKind(StrEnum):
    """How an engine knows the digest it reports."""

    MEMORY = "memory"
    """Read back from the memory the kernels use."""
    RECEIVED = "received"
    """Of the bytes received; packing cannot be inverted, so a behavioural probe is required at every commit."""


class ReceivesInto(StrEnum):
    """Where an engine lets a version be written while it stages."""

    STAGING = "staging"
    """Beside what serves: generation goes on, and a rollback forgets what was staged."""
    LIVE = "live"
    """Over what serves: it pauses when it begins to stage, and serves nothing until a commit. There is nothing to roll
    back to: it needs a full verified reload of the parent."""


class Capabilities(msgspec.Struct, frozen=True, tag="capabilities.2"):
    """What an engine can do beyond the least."""

    kept_sets: bool
    """Returns the kept set of truncated distributions."""
    routes: bool
    """Returns expert routes."""
    kv_versions: bool
    """Tags KV with the version that computed it."""
    raw_logprobs: bool
    """Returns log-probabilities of the untransformed distribution as well."""
    barriers: bool
    """Batches the requests of a barrier in id order (needed for bit-for-bit runs)."""
    pinned_versions: bool
    """Serves a request by the version it names even after a newer one was committed."""
    double_buffered: bool
    """Receives a version while serving another, and swaps pointers."""
    receives_into: ReceivesInto
    """Where a version is written while it is staged. Double-buffered engines: beside what serves."""
    in_flight: frozenset[InFlightMode]
    """What it can do with running generations at a commit."""
    transports: frozenset[str]
    """Tags of the weight sources it can read, e.g. `shared`, `disk`."""
    digest: DigestKind
    """How it proves what it holds."""
    max_context_tokens: int
    """Longest sequence (prompt and sampled) it serves."""
    logit_bias: bool = False
    """Samples and scores with a logit bias."""
    stop_strings: bool = False
    """Ends a generation at a text. Like every ability, it is lacking where it is not declared."""
    ids_scored: bool = False
    """Scores more ids at a position than the one that is there, and finds the likeliest ones."""
    adapters: bool = False
    """Computes with a LoRA adapter beside a frozen base, and receives that alone."""
    formats: frozenset[str] = frozenset()
    """Formats in which it holds tensors that do not come as the trainer cast them (`TensorFormat.name`)."""


class Barrier(msgspec.Struct, frozen=True, tag="barrier.1"):
    """Requests that start together, in id order, whatever the order of arrival."""

    name: str
    """Identity of the barrier."""
    size: int
    """Number of requests it waits for."""


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate.2"):
    """One generation call. Sending the same `request_id` twice is refused: a generation is never started twice."""

    request_id: str
    """Unique over the run."""
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    sampling: SamplingParams
    """The distribution to sample from."""
    seed: int
    """Fixes the request's random numbers, whatever else the engine serves. 64 bits, unsigned."""
    max_new_tokens: int
    """At most this many tokens are sampled; >= 1."""
    stop_ids: tuple[int, ...]
    """Ids that end the generation; the one sampled is the last token."""
    priority: int
    """Smaller is served first (the oldest group)."""
    session_key: str
    """Requests of one trajectory share it."""
    purpose: Purpose
    """What it is for."""
    pinned: PolicyVersion | None = None
    """Serve by exactly this version. None: whichever is current, switching at commits."""
    at_least: PolicyVersion | None = None
    """Serve by this version or newer ones (`PolicyVersion.order`); an engine that serves an older one refuses. Not
    together with `pinned`. None: any will do."""
    barrier: Barrier | None = None
    """Start together with others. None: at once."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the generation: the token that completes one is the last. The text is that of the sampled tokens
    alone, special tokens left out. Ids are never cut."""
    want_raw_logprobs: bool = False
    """Also return raw log-probabilities."""
    want_routes: bool = False
    """Also return expert routes."""


class GenerateEnd(msgspec.Struct, frozen=True, tag="generate_end.1"):
    """What is known at the end of a generation."""

    finish_reason: FinishReason
    """Why it ended."""
    engine: EngineId
    """Who served it."""
    dtype: str
    """Element type of the weights."""
    kernels: str
    """Kernel mode."""
    prompt_hash: str
    """BLAKE3 (hex) of the executed int32 prompt ids."""
    cached_tokens: int
    """Prompt tokens from the prefix cache."""
    drafted_tokens: int
    """Tokens guessed by speculation and checked by the model. 0: there was none."""
    accepted_tokens: int
    """Of those, guesses that were right and saved a forward."""
    queue_s: float
    """Seconds from arrival to the first computation."""
    generate_s: float
    """Seconds from the first computation to the end."""


class GenerateChunk(msgspec.Struct, frozen=True, tag="generate_chunk.1"):
    """New tokens of one generation (a delta, never cumulative). C tokens, C may be 0 in the last chunk."""

    request_id: str
    """The request."""
    token_ids: np.ndarray
    """int32 [C]."""
    logprobs: np.ndarray
    """float32 [C]: under the distribution sampled from."""
    policy_version: np.ndarray
    """int32 [C]: version numbers."""
    kv_version: np.ndarray
    """int32 [C]: oldest version number behind the KV read."""
    versions: tuple[PolicyVersion, ...]
    """Every version named in this chunk."""
    kept: KeptSets | None
    """Kept sets of the C tokens. None: nothing was removed."""
    raw_logprobs: np.ndarray | None
    """float32 [C]. None: not asked for."""
    routes: np.ndarray | None
    """[R, L, E] routes of inputs that became known. None: not asked for."""
    end: GenerateEnd | None
    """Present in the last chunk only."""


class ScoreRequest(msgspec.Struct, frozen=True, tag="score.1"):
    """Teacher-forced log-probabilities of given tokens. N positions."""

    request_id: str
    """Unique over the run."""
    token_ids: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [N]: indices of the tokens to score, ascending, each >= 1."""
    temperature: np.ndarray
    """float32 [N]."""
    kept: KeptSets | None
    """Kept sets to renormalise over. None: full vocabulary."""
    bias: TokenBias | None
    """Biases to add to the logits. None: no token has one."""
    top: int = 0
    """Also find the so many likeliest ids at each position, of the same distribution. 0: do not."""
    others: IdLists | None = None
    """Also score these ids at each position; they must be in its kept set. None: none."""


class ScoreResult(msgspec.Struct, frozen=True, tag="score_result.1"):
    """Answer to a ScoreRequest."""

    logprobs: np.ndarray
    """float32 [N]."""
    version: PolicyVersion
    """The version that scored."""
    top: IdScores | None = None
    """The likeliest ids, at most `ScoreRequest.top` at a position: all of a kept set that is smaller. None: not asked
    for."""
    others: np.ndarray | None = None
    """float32 [K]: log-probabilities of `ScoreRequest.others`. None: not asked for."""


class StageReport(msgspec.Struct, frozen=True, tag="stage.2"):
    """A version lies in the engine's staging memory; it is not serving."""

    size_bytes: int
    """Bytes of the version."""
    moved_bytes: int
    """Bytes that travelled to this engine: fewer than those of the version where only slices or changes do."""
    receive_s: float
    """Seconds to receive them."""


class VerifyReport(msgspec.Struct, frozen=True, tag="verify.1"):
    """The digest of what was staged."""

    digest: str
    """Root digest (hex)."""
    kind: DigestKind
    """How it is known."""
    verify_s: float
    """Seconds it took."""
    wrong: tuple[str, ...] = ()
    """Names of tensors that differ from the manifest, for people. Empty also where the engine cannot tell."""


class CommitReport(msgspec.Struct, frozen=True, tag="commit.1"):
    """The staged version serves."""

    version: PolicyVersion
    """What serves now."""
    pause_s: float
    """Seconds without generation that the commit caused."""
    running: int
    """Generations that were in flight."""


class EngineStatus(msgspec.Struct, frozen=True, tag="status.1"):
    """A look at an engine."""

    engine: EngineId
    """Who."""
    version: PolicyVersion | None
    """What serves. None: no weights yet."""
    staged: PolicyVersion | None
    """What is staged. None: nothing."""
    running: int
    """Generations being computed."""
    queued: int
    """Generations waiting."""
    capabilities: Capabilities
    """What it can do."""


class Engine(Protocol):
    """Generates and scores. Every call has a deadline of its own and raises `EngineError` when it fails."""

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond the least. Known once the engine is healthy."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream the tokens of one generation. Closing the iterator cancels it."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation early; its stream ends with reason `aborted` and what it has. Unknown ids are ignored."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Teacher-forced log-probabilities under the version that serves."""
        ...

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive a version; `Capabilities.receives_into` says where. What was staged before is forgotten.

        Raises:
            EngineError: a tensor is missing, unknown or misshapen, or the engine failed.
            TransferInterruptedError: the transfer broke elsewhere, and the engine is well.
        """
        ...

    async def verify(self) -> VerifyReport:
        """Digest what is staged."""
        ...

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Serve the staged version from the next token boundary on. Atomic. Raises when it is not what is staged."""
        ...

    async def rollback(self) -> None:
        """Forget what is staged; the serving version goes on."""
        ...

    async def status(self) -> EngineStatus:
        """A look at the engine."""
        ...

    async def health(self) -> None:
        """Return when the engine answers; raise `EngineError` otherwise."""
        ...

    async def close(self) -> None:
        """End the engine and its process. Idempotent."""
        ...
