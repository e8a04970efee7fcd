"""The engine port over a vLLM server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Self, final

import numpy as np

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError, EngineError, EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    EngineStatus,
    GenerateChunk,
    GenerateRequest,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.refusals import why_not_generate, why_not_score, why_not_version
from fathom.rollout.engines.seen_requests import SeenRequests
from fathom.rollout.engines.vllm.adapter import ServedAdapter
from fathom.rollout.engines.vllm.expected import Form, expected_tensors
from fathom.rollout.engines.vllm.gate import Gate
from fathom.rollout.engines.vllm.generation import Generation
from fathom.rollout.engines.vllm.launch.probing import probe
from fathom.rollout.engines.vllm.launch.process import ADAPTER, MODEL, VllmProcess
from fathom.rollout.engines.vllm.requests import generate_body, score_body, why_not_exact
from fathom.rollout.engines.vllm.server import VllmServer
from fathom.rollout.engines.vllm.spec import VllmSpec
from fathom.rollout.engines.vllm.weights import Weights
from fathom.rollout.engines.vllm.wire import Answer, Facts


@final
class VllmEngine:
    """Generates and scores by a vLLM server; its weights are replaced in place, while it is paused."""

    def __init__(
        self,
        spec: VllmSpec,
        server: VllmServer,
        facts: Facts,
        able: Capabilities,
        expected: dict[str, Form],
        adapter: AdapterIdentity | None,
    ) -> None:
        self._spec = spec
        self._server = server
        self._facts = facts
        self._capabilities = able
        self._gate = Gate()
        self._model = MODEL if adapter is None else ADAPTER
        self._weights = Weights(spec, server, self._gate, expected, adapter)
        self._running: dict[str, Generation] = {}
        self._waiting: set[str] = set()
        self._aborted: set[str] = set()
        self._seen = SeenRequests()
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    async def launch(cls, spec: VllmSpec) -> Self:
        """Start the server, or attach to the one at `spec.url`, and find out what it can do.

        Raises:
            ConfigError: there is no environment, the port is taken, or the server cannot be used.
            EngineDeadError: it ended while it started.
            EngineTimeoutError: it was not healthy in time.
        """
        expected, adapter = await _expected(spec)
        process = await VllmProcess.launch(spec) if spec.url is None else None
        url = spec.url if process is None else process.url
        assert url is not None
        server = VllmServer(spec.engine, url, spec.token, process)
        try:
            async with server.boundary("start", spec.start_timeout_s):
                facts, able = await probe(server, spec.engine, adapters=adapter is not None)
            _check(spec, facts)
        except BaseException:
            await server.close()
            raise
        return cls(spec, server, facts, able, expected, adapter)

    @property
    def id(self) -> EngineId:
        """See `Engine.id`."""
        return self._spec.engine

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine.capabilities`."""
        return self._capabilities

    @property
    def pid(self) -> int | None:
        """Process id of what was started here. None: the server was only attached to."""
        return self._server.pid

    @property
    def server(self) -> VllmServer:
        """The server behind it."""
        return self._server

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See `Engine.generate`. After a commit, tokens come at the end: vLLM says only then which version made them.

        `queue_s` is the time until the request was sent: how long vLLM lets it wait is part of `generate_s`.
        """
        arrived_s = time.monotonic()
        name = request.request_id
        self._admit(request)
        self._waiting.add(name)
        generation: Generation | None = None
        try:
            async with self._server.boundary("generate", self._spec.request_timeout_s):
                await self._gate.enter()
            try:
                version = self._weights.serving
                if wrong := why_not_version(request, version):
                    self._seen.discard(name)
                    raise EngineRefusedError(self.id, wrong)
                generation = Generation(request, version, self._facts.vocab_size, arrived_s)
                self._running[name] = generation
                if name in self._aborted:
                    generation.abort()
                    yield self._last(generation)
                    return
                async for chunk in self._chunks(generation, version):
                    yield chunk
            finally:
                self._running.pop(name, None)
                self._gate.leave()
                if generation is not None and not generation.ended:
                    self._leave_behind(name)
        finally:
            self._waiting.discard(name)
            self._aborted.discard(name)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        if request_id in self._waiting:
            self._aborted.add(request_id)
            async with self._server.boundary("abort", self._spec.call_timeout_s):
                await self._server.abort((request_id,))

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See `Engine.score`. It never reads the prefix cache, and no commit comes between."""
        if wrong := why_not_score(request, self._capabilities, self._facts.vocab_size):
            raise EngineRefusedError(self.id, wrong)
        async with self._server.boundary("score", self._spec.request_timeout_s):
            await self._gate.enter_briefly()
            try:
                version = self._weights.serving
                answer = await self._server.answer(score_body(request, self._model))
            finally:
                self._gate.leave_briefly()
        return ScoreResult(logprobs=self._scores(request, answer, version), version=version)

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """See `Engine.stage`: into the worker's own memory, beside the weights that serve."""
        return await self._weights.stage(manifest, source)

    async def verify(self) -> VerifyReport:
        """See `Engine.verify`: of the bytes received, since vLLM packs what it computes with."""
        return await self._weights.verify()

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """See `Engine.commit`. vLLM is paused from before the first weight is touched until the last is in place."""
        return await self._weights.commit(version, mode, self._running)

    async def rollback(self) -> None:
        """See `Engine.rollback`."""
        await self._weights.rollback()

    async def status(self) -> EngineStatus:
        """See `Engine.status`. Counts what was sent from here."""
        async with self._server.boundary("status", self._spec.call_timeout_s):
            await self._server.staged()
        running = sum(generation.started for generation in self._running.values())
        return EngineStatus(
            engine=self.id,
            version=self._weights.version,
            staged=self._weights.staged,
            running=running,
            queued=len(self._waiting) - running,
            capabilities=self._capabilities,
        )

    async def health(self) -> None:
        """See `Engine.health`: its worker answers, and holds whole weights."""
        self._weights.require_whole()
        await self.status()

    async def close(self) -> None:
        """See `Engine.close`. A server that was only attached to goes on."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._server.close()
        self._weights.close()

    def _admit(self, request: GenerateRequest) -> None:
        wrong = why_not_generate(request, self._capabilities, self._facts.vocab_size) or why_not_exact(request)
        name = request.request_id
        if name in self._seen or name in self._running or name in self._waiting:
            wrong = f"request {name} was started before; a generation is never started twice"
        if wrong:
            raise EngineRefusedError(self.id, wrong)
        _ = self._weights.serving
        self._seen.add(name)

    async def _chunks(self, generation: Generation, version: PolicyVersion) -> AsyncIterator[GenerateChunk]:
        request = generation.request
        room = self._capabilities.max_context_tokens - len(request.prompt_ids)
        body = generate_body(request, version, room, self._facts.vocab_size, self._model)
        events = self._server.stream(body)
        ends_s = time.monotonic() + self._spec.request_timeout_s
        try:
            while True:
                async with self._server.boundary("generate", ends_s - time.monotonic()):
                    event = await anext(events, None)
                if event is None:
                    break
                if (chunk := generation.take(event)) is not None:
                    yield chunk
                if request.request_id in self._aborted and not generation.ended:  # told before the server knew it
                    await self.abort(request.request_id)
            yield self._last(generation)
        except ValueError as error:
            raise EngineError(self.id, f"request {request.request_id}: {error}") from error

    def _last(self, generation: Generation) -> GenerateChunk:
        kernels = f"vllm {self._facts.vllm} {'compiled' if self._facts.compiled else 'eager'}"
        return generation.last(self.id, self._facts.dtype, kernels)

    def _scores(self, request: ScoreRequest, answer: Answer, version: PolicyVersion) -> np.ndarray:
        """float32 [N]; checks that this version, and no other, gave them."""
        by_position = answer.prompt_logprobs or ()
        spans = answer.choices[0].weight_versions or () if answer.choices else ()
        if {span.version for span in spans} != {version.name} or len(by_position) != len(request.token_ids):
            raise EngineError(self.id, f"the answer to a scoring under {version.name} is of {spans}")
        found: list[float] = []
        for position in request.positions.tolist():
            entry = by_position[position]
            if entry is None:
                raise EngineError(self.id, f"no log-probability at position {position}")
            found.append(entry[int(request.token_ids[position])].logprob)
        if not np.all(np.isfinite(found)):
            raise EngineError(self.id, "a log-probability is no number: the weights have diverged")
        return np.array(found, np.float32)

    def _leave_behind(self, name: str) -> None:
        """End what nobody reads any more."""

        async def end() -> None:
            async with self._server.boundary("abort", self._spec.call_timeout_s):
                await self._server.abort((name,))

        task = asyncio.get_running_loop().create_task(end())
        self._leaving.add(task)
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # an engine that does not answer is found by those who wait for it


async def _expected(spec: VllmSpec) -> tuple[dict[str, Form], AdapterIdentity | None]:
    """What a version must consist of, and the adapter that it must be of. None: it must be a whole model."""
    if spec.adapter is None:
        return expected_tensors(spec.model_folder, spec.dtype.value), None
    if spec.url is not None:
        raise ConfigError(
            f"engine {spec.engine}: a server at engine.vllm.url was not started with this run's adapter; remove the "
            "url, or set lora.publish = 'merged'"
        )
    prepare = partial(ServedAdapter.prepare, spec.model_folder, spec.dtype, spec.adapter)
    served = await asyncio.to_thread(prepare, spec.adapter_folder, spec.engine)
    return served.expected, served.identity


def _check(spec: VllmSpec, facts: Facts) -> None:
    """What the run counts on; an attached server may be otherwise."""
    if facts.dtype != spec.dtype.value:
        raise ConfigError(
            f"engine {spec.engine}: the server computes in {facts.dtype}, the published weights are {spec.dtype}; "
            "start it with that dtype, or set trainer.dtype"
        )
