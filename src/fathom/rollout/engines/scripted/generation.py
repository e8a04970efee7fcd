"""One generation of a scripted engine, and the ways in which its chunks may be wrong."""

from __future__ import annotations

import asyncio
from typing import final

import msgspec
import numpy as np
from blake3 import blake3

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.scripted.fault import Fault, Trouble
from fathom.rollout.engines.scripted.script import Token
from fathom.rollout.engines.stop_strings import Decode, StopMatcher


@final
class Generation:
    """What was sampled so far, and under which versions."""

    def __init__(self, request: GenerateRequest, max_context_tokens: int, decode: Decode | None) -> None:
        self.request = request
        self._matcher = StopMatcher(decode, request.stop_strings) if decode and request.stop_strings else None
        self.turn = asyncio.Event()
        """Set when it may run, was aborted, or the engine died."""
        self.started = False
        self.aborted = False
        self.finish: FinishReason | None = None
        self._prompt = len(request.prompt_ids)
        self._limit = min(self._prompt + request.max_new_tokens, max_context_tokens)
        self._context = request.prompt_ids.tolist()
        self._tokens: list[Token] = []
        self._versions: list[tuple[PolicyVersion, PolicyVersion]] = []
        self._kv: PolicyVersion | None = None
        self._sent = 0
        self._cached_tokens = 0

    @property
    def ended(self) -> bool:
        """It will not run any more."""
        return self.aborted

    @property
    def context(self) -> np.ndarray:
        """int32 [T]: prompt and sampled tokens."""
        return np.array(self._context, np.int32)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self._tokens)

    @property
    def unsent(self) -> int:
        """Sampled tokens that are in no chunk yet."""
        return len(self._tokens) - self._sent

    def start(self, version: PolicyVersion, cached: bool) -> None:
        """Its turn has come, under `version`; `cached`: its prompt was computed before."""
        self.started = True
        self._kv = version
        self._cached_tokens = self._prompt - 1 if cached else 0
        self.turn.set()

    def recompute(self, version: PolicyVersion) -> None:
        """Its context is computed again under `version`."""
        self._kv = version

    def append(self, token: Token, version: PolicyVersion) -> None:
        """Add a token that `version` made."""
        if self._kv is None:
            raise AssertionError("a generation samples after it has started")
        self._kv = min(self._kv, version, key=lambda each: each.number)
        self._context.append(token.id)
        self._tokens.append(token)
        self._versions.append((version, self._kv))
        completes = self._matcher is not None and self._matcher.push(token.id) is not None
        if completes or token.id in self.request.stop_ids:
            self.finish = FinishReason.STOP
        elif len(self._tokens) >= self.request.max_new_tokens:
            self.finish = FinishReason.LENGTH
        elif len(self._context) >= self._limit:
            self.finish = FinishReason.CONTEXT

    def chunk(self, engine: EngineId, finish: FinishReason | None) -> GenerateChunk:
        """What was not sent yet; with the end when `finish` is given."""
        tokens, versions = self._tokens[self._sent :], self._versions[self._sent :]
        self._sent = len(self._tokens)
        named = {version.number: version for pair in versions for version in pair}
        raw = np.array([token.raw_logprob for token in tokens], np.float32)
        return GenerateChunk(
            request_id=self.request.request_id,
            token_ids=np.array([token.id for token in tokens], np.int32),
            logprobs=np.minimum(np.array([token.logprob for token in tokens], np.float32), 0),
            policy_version=np.array([version.number for version, _ in versions], np.int32),
            kv_version=np.array([kv.number for _, kv in versions], np.int32),
            versions=tuple(named[number] for number in sorted(named)),
            kept=_kept(tokens) if self.request.sampling.truncates else None,
            raw_logprobs=np.minimum(raw, 0) if self.request.want_raw_logprobs else None,
            routes=None,
            end=self._end(engine, finish) if finish is not None else None,
        )

    def _end(self, engine: EngineId, finish: FinishReason) -> GenerateEnd:
        return GenerateEnd(
            finish_reason=finish,
            engine=engine,
            dtype="float32",
            kernels="scripted",
            prompt_hash=blake3(self.request.prompt_ids.astype(np.int32).tobytes()).hexdigest(),
            cached_tokens=self._cached_tokens,
            drafted_tokens=0,
            accepted_tokens=0,
            queue_s=0.0,
            generate_s=0.0,
        )


def tampered(chunk: GenerateChunk, fault: Fault | None, sampled: int) -> GenerateChunk:
    """The chunk as a faulty engine sends it, `sampled` tokens into the generation."""
    if fault is None or sampled < fault.after_tokens:
        return chunk
    logprobs = chunk.logprobs.copy()
    match fault.trouble:
        case Trouble.ONE_LOGPROB_FEWER:
            return msgspec.structs.replace(chunk, logprobs=logprobs[:-1])
        case Trouble.NAN_LOGPROB | Trouble.POSITIVE_LOGPROB:
            logprobs[-1:] = np.nan if fault.trouble is Trouble.NAN_LOGPROB else 1.0
            return msgspec.structs.replace(chunk, logprobs=logprobs)
        case Trouble.UNKNOWN_VERSION:
            return msgspec.structs.replace(chunk, policy_version=chunk.policy_version + 1000)
        case Trouble.OTHER_PROMPT if chunk.end is not None:
            end = msgspec.structs.replace(chunk.end, prompt_hash="0" * 64)
            return msgspec.structs.replace(chunk, end=end)
        case Trouble.NO_KEPT_SETS:
            return msgspec.structs.replace(chunk, kept=None)
        case _:
            return chunk


def _kept(tokens: list[Token]) -> KeptSets:
    offsets = np.cumsum([0, *(len(token.kept) for token in tokens)], dtype=np.int64)
    ids = np.concatenate([*(token.kept for token in tokens), np.empty(0, np.int32)]).astype(np.int32)
    return KeptSets(offsets=offsets, ids=ids)
