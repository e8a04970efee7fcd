"""What a conformance case works with: an engine, a way to publish to it, and short forms of the port's calls."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import Barrier, Engine, GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.records.sampling import FinishReason, InFlightMode, Purpose, SamplingParams
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.stop_strings import Decode

Publish = Callable[[int], Awaitable[tuple[Manifest, WeightSource]]]
Case = Callable[["Subject"], Awaitable[None]]

PROMPT = (1, 5, 9, 4, 7, 3, 8, 2)
PLAIN = SamplingParams()


@dataclass(slots=True, kw_only=True)
class Generated:
    """A whole generation: its chunks, joined, after the checks that hold for every one."""

    chunks: list[GenerateChunk]
    request: GenerateRequest
    token_ids: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)
    policy_version: np.ndarray = field(init=False)
    kv_version: np.ndarray = field(init=False)
    end: GenerateEnd = field(init=False)

    def __post_init__(self) -> None:
        assert [chunk.end is not None for chunk in self.chunks] == [False] * (len(self.chunks) - 1) + [True]
        end = self.chunks[-1].end
        assert end is not None
        self.end = end
        self.token_ids = _join(self.chunks, lambda chunk: chunk.token_ids, np.int32)
        self.logprobs = _join(self.chunks, lambda chunk: chunk.logprobs, np.float32)
        self.policy_version = _join(self.chunks, lambda chunk: chunk.policy_version, np.int32)
        self.kv_version = _join(self.chunks, lambda chunk: chunk.kv_version, np.int32)
        self._check()

    @property
    def text(self) -> list[int]:
        """The sampled ids."""
        return self.token_ids.tolist()

    @property
    def context(self) -> np.ndarray:
        """int32: prompt and sampled tokens."""
        return np.concatenate([self.request.prompt_ids, self.token_ids])

    @property
    def kept(self) -> KeptSets | None:
        """Kept sets of all tokens. None: none were sent."""
        parts = [chunk.kept for chunk in self.chunks]
        sent = [part for part in parts if part is not None]
        if not sent:
            return None
        lengths = np.concatenate([np.diff(part.offsets) for part in sent])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return KeptSets(offsets=offsets, ids=np.concatenate([part.ids for part in sent]))

    @property
    def routes(self) -> np.ndarray | None:
        """[T-1, L, E]: experts of all inputs. None: none were sent."""
        parts = [chunk.routes for chunk in self.chunks if chunk.routes is not None]
        return np.concatenate(parts) if parts else None

    def _check_routes(self) -> None:
        tokens, inputs = 0, 0
        for chunk in self.chunks:
            tokens += len(chunk.token_ids)
            inputs += 0 if chunk.routes is None else len(chunk.routes)
            known = len(self.request.prompt_ids) + tokens - 1 if tokens and self.request.want_routes else 0
            assert inputs == known or not tokens, "routes come as inputs become known, each once"

    def _check(self) -> None:
        self._check_routes()
        size = len(self.token_ids)
        assert len(self.logprobs) == len(self.policy_version) == len(self.kv_version) == size
        assert size <= self.request.max_new_tokens
        assert np.all(np.isfinite(self.logprobs))
        assert np.all(self.logprobs <= 0)
        assert np.all(self.kv_version <= self.policy_version), "KV cannot be newer than the token that read it"
        assert all(chunk.request_id == self.request.request_id for chunk in self.chunks)
        for chunk in self.chunks:
            numbers = {version.number for version in chunk.versions}
            assert numbers >= {*chunk.policy_version.tolist(), *chunk.kv_version.tolist()}
        executed = blake3(self.request.prompt_ids.astype(np.int32).tobytes()).hexdigest()
        assert self.end.prompt_hash == executed
        assert 0 <= self.end.cached_tokens < len(self.request.prompt_ids)
        if self.request.stop_strings:
            return
        stops = [index for index, token in enumerate(self.text) if token in self.request.stop_ids]
        expected = [size - 1] if self.end.finish_reason is FinishReason.STOP else []
        assert stops == expected, "a stop id is sampled once and is the last token"


@final
class Subject:
    """An engine under test. It needs a context of at least 192 tokens and a vocabulary of at least 16."""

    def __init__(
        self,
        engine: Engine,
        publish: Publish,
        vocab_size: int,
        tolerance: float = 1e-5,
        decode: Decode | None = None,
    ) -> None:
        """`publish(n)` makes weights that differ from those of every other n readable; `tolerance` in nats; `decode`
        makes the engine's text (None: stop strings are not tried)."""
        self.engine = engine
        self.publish = publish
        self.vocab_size = vocab_size
        self.tolerance = tolerance
        self.decode = decode
        self._numbers = itertools.count(1)
        self._names = itertools.count()

    async def prepare(self) -> Manifest:
        """Stage and verify a new version."""
        manifest, source = await self.publish(next(self._numbers))
        await self.engine.stage(manifest, source)
        assert (await self.engine.verify()).digest == manifest.version.digest
        return manifest

    async def serve(self, mode: InFlightMode = InFlightMode.CONTINUE) -> PolicyVersion:
        """Publish and commit a new version."""
        version = (await self.prepare()).version
        report = await self.engine.commit(version, mode)
        assert report.version == version
        return version

    def name(self) -> str:
        """A request id that was never used before on this subject."""
        return f"conformance/{next(self._names)}"

    def request(
        self,
        *,
        prompt: tuple[int, ...] = PROMPT,
        new: int = 24,
        seed: int = 0,
        stop: tuple[int, ...] = (),
        stop_strings: tuple[str, ...] = (),
        sampling: SamplingParams = PLAIN,
        pinned: PolicyVersion | None = None,
        at_least: PolicyVersion | None = None,
        barrier: Barrier | None = None,
        name: str | None = None,
        priority: int = 0,
        raw: bool = False,
        routes: bool = False,
    ) -> GenerateRequest:
        """A request for `new` tokens."""
        return GenerateRequest(
            request_id=name or self.name(),
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling,
            seed=seed,
            max_new_tokens=new,
            stop_ids=stop,
            stop_strings=stop_strings,
            priority=priority,
            session_key="conformance",
            purpose=Purpose.ROLLOUT if pinned is None else Purpose.EVALUATION,
            pinned=pinned,
            at_least=at_least,
            barrier=barrier,
            want_raw_logprobs=raw,
            want_routes=routes,
        )

    async def run(self, request: GenerateRequest) -> Generated:
        """The whole generation."""
        return Generated(chunks=[chunk async for chunk in self.engine.generate(request)], request=request)

    async def begin(self, request: GenerateRequest) -> Running:
        """A generation of which some tokens are known already."""
        stream = self.engine.generate(request)
        first = [await anext(stream)]
        while not len(first[-1].token_ids):
            first.append(await anext(stream))
        return Running(stream=stream, chunks=first, request=request)


@dataclass(slots=True, kw_only=True)
class Running:
    """A generation under way."""

    stream: AsyncIterator[GenerateChunk]
    chunks: list[GenerateChunk]
    request: GenerateRequest

    async def finish(self) -> Generated:
        """The whole generation, once it has ended."""
        return Generated(chunks=[*self.chunks, *[chunk async for chunk in self.stream]], request=self.request)


def _join(chunks: list[GenerateChunk], column: Callable[[GenerateChunk], np.ndarray], dtype: type) -> np.ndarray:
    parts = [column(chunk) for chunk in chunks]
    assert all(part.dtype == np.dtype(dtype) for part in parts), [part.dtype for part in parts]
    return np.concatenate(parts)
