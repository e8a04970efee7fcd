"""What one generation call gave, put together from its chunks and checked against what was sent. S sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.errors import RecordError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd
from fathom.core.records.sampling import SamplingParams
from fathom.core.records.trajectory import KeptSets, Turn


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The sampled tokens of one call, with all that is recorded of them."""

    token_ids: np.ndarray
    """int32 [S]."""
    logprobs: np.ndarray
    """float32 [S]: under the distribution sampled from."""
    policy_version: np.ndarray
    """int32 [S]."""
    kv_version: np.ndarray
    """int32 [S]."""
    kept: KeptSets | None
    """Kept sets. None: nothing was removed."""
    raw_logprobs: np.ndarray | None
    """float32 [S]: at temperature 1 over all tokens. None: not asked for."""
    routes: np.ndarray | None
    """[R, L, E]: expert routes of the inputs that no earlier call recorded. None: not asked for, or none sampled."""
    routed: int
    """Inputs, from the first of the context on, whose routes are recorded by now."""
    versions: tuple[PolicyVersion, ...]
    """Every version that made a token or KV of it, ordered by number."""
    sampling: SamplingParams
    """The distribution."""
    end: GenerateEnd
    """What is known at its end."""

    def turn_at(self, start: int) -> Turn:
        """The record of the call, its first sampled token being the `start`-th of its branch."""
        return Turn(
            start=start,
            end=start + len(self.token_ids),
            engine=self.end.engine,
            dtype=self.end.dtype,
            kernels=self.end.kernels,
            sampling=self.sampling,
            finish_reason=self.end.finish_reason,
            prompt_hash=self.end.prompt_hash,
            cached_tokens=self.end.cached_tokens,
            drafted_tokens=self.end.drafted_tokens,
            accepted_tokens=self.end.accepted_tokens,
            queue_s=self.end.queue_s,
            generate_s=self.end.generate_s,
        )


def sampled_from(
    prompt_ids: np.ndarray,
    chunks: Sequence[GenerateChunk],
    sampling: SamplingParams,
    *,
    routes: bool,
    routed: int = 0,
) -> Sampled:
    """Put the chunks of one call together.

    Args:
        prompt_ids: int32 [P], as sent.
        chunks: all of them, in order.
        sampling: the distribution asked for.
        routes: expert routes were asked for.
        routed: inputs whose routes an earlier call of the same context recorded; those stay.

    Raises:
        RecordError: the engine's answer contradicts itself, or it executed another prompt.
    """
    end = _end(chunks)
    if end.prompt_hash != prompt_hash(prompt_ids):
        raise RecordError("the engine executed another prompt than it was sent")
    token_ids = _join([chunk.token_ids for chunk in chunks], np.int32)
    inputs = len(prompt_ids) + len(token_ids) - 1
    all_routes = _join_routes(chunks, inputs) if routes and len(token_ids) else None
    return Sampled(
        token_ids=token_ids,
        logprobs=_join([chunk.logprobs for chunk in chunks], np.float32),
        policy_version=_join([chunk.policy_version for chunk in chunks], np.int32),
        kv_version=_join([chunk.kv_version for chunk in chunks], np.int32),
        kept=_join_kept(chunks) if sampling.truncates else None,
        raw_logprobs=_join_raw(chunks),
        routes=None if all_routes is None else all_routes[routed:],
        routed=routed if all_routes is None else inputs,
        versions=_versions(chunks),
        sampling=sampling,
        end=end,
    )


def prompt_hash(prompt_ids: np.ndarray) -> str:
    """Identity of a prompt as sent: BLAKE3 (hex) of its int32 ids."""
    return blake3(np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()).hexdigest()


def _end(chunks: Sequence[GenerateChunk]) -> GenerateEnd:
    ends = [chunk.end for chunk in chunks if chunk.end is not None]
    if len(ends) != 1 or chunks[-1].end is None:
        raise RecordError(f"a generation must end exactly once, in its last chunk; got {len(ends)} ends")
    return ends[0]


def _versions(chunks: Sequence[GenerateChunk]) -> tuple[PolicyVersion, ...]:
    versions = {version.number: version for chunk in chunks for version in chunk.versions}
    if any(versions[version.number] != version for chunk in chunks for version in chunk.versions):
        raise RecordError("one version number with two digests or incarnations")
    return tuple(versions[number] for number in sorted(versions))


def _join(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    for part in parts:
        if part.dtype != np.dtype(dtype):
            raise RecordError(f"the engine sent {part.dtype} where {np.dtype(dtype)} is due")
    return np.concatenate([*parts, np.empty(0, dtype)])


def _join_raw(chunks: Sequence[GenerateChunk]) -> np.ndarray | None:
    raw = [chunk.raw_logprobs for chunk in chunks if chunk.raw_logprobs is not None]
    return _join(raw, np.float32) if raw else None


def _join_routes(chunks: Sequence[GenerateChunk], expected: int) -> np.ndarray:
    """[expected, L, E]: the routes of all inputs, each delivered once and in order."""
    parts = [chunk.routes for chunk in chunks if chunk.routes is not None and len(chunk.routes)]
    if not parts or len({(part.dtype, part.shape[1:]) for part in parts}) != 1 or parts[0].ndim != 3:
        raise RecordError("the engine sent no expert routes, or routes of several shapes")
    if (total := sum(map(len, parts))) != expected:
        raise RecordError(f"the engine sent expert routes of {total} inputs of {expected}: coverage must be complete")
    return np.concatenate(parts)


def _join_kept(chunks: Sequence[GenerateChunk]) -> KeptSets:
    kept: list[KeptSets] = []
    for chunk in chunks:
        if chunk.kept is None and len(chunk.token_ids):
            raise RecordError("the engine sent no kept sets for a truncating distribution")
        if chunk.kept is not None:
            kept.append(chunk.kept)
    lengths = [np.diff(part.offsets) for part in kept]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.empty(0, np.int64)]))]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=_join([part.ids for part in kept], np.int32))
