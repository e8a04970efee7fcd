"""A scheduler without process or network, driven turn by turn; versions appear in it without a transport."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest
from fathom.core.ports.engine import Barrier, Capabilities, DigestKind, GenerateRequest, ReceivesInto
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.server.decode.decoder import Decoder
from fathom.rollout.engines.embedded.server.decode.draft.proposer import Proposer
from fathom.rollout.engines.embedded.server.decode.forward import Forward
from fathom.rollout.engines.embedded.server.job import Stream
from fathom.rollout.engines.embedded.server.scheduler import Scheduler
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet, WeightSets


def nothing(weights: WeightSet, number: int) -> None:
    """Versions of a forward that has no weights."""


@dataclass(kw_only=True)
class Turns:
    forward: Forward
    weights: WeightSets = field(default_factory=lambda: WeightSets({}))
    fill: Callable[[WeightSet, int], None] = nothing
    slots: int = 3
    context: int = 40
    step: int = 16
    pages: int = 4
    page_tokens: int = 32
    proposer: Proposer | None = None
    live: int = 0
    streams: list[tuple[GenerateRequest, Stream]] = field(default_factory=list)
    names: count = field(default_factory=count)

    def __post_init__(self) -> None:
        self.decoder = Decoder(
            EngineId("e"),
            self.forward,
            slots=self.slots,
            max_tokens=self.context,
            step_tokens=self.step,
            pages=self.pages,
            page_tokens=self.page_tokens,
            proposer=self.proposer,
            draft_tokens=4,
        )
        capabilities = Capabilities(
            kept_sets=True,
            routes=self.forward.has_experts,
            kv_versions=True,
            raw_logprobs=True,
            barriers=True,
            pinned_versions=True,
            double_buffered=True,
            receives_into=ReceivesInto.STAGING,
            in_flight=frozenset(InFlightMode),
            transports=frozenset(),
            digest=DigestKind.MEMORY,
            max_context_tokens=self.context,
            logit_bias=True,
        )
        deliver = lambda chunks: [stream.put_nowait(chunk) for stream, chunk in chunks] and None  # noqa: E731
        self.scheduler = Scheduler(EngineId("e"), capabilities, self.decoder, self.weights, deliver)
        self.commit(InFlightMode.CONTINUE)

    def turn(self, times: int = 1) -> None:
        """Every page is accounted for after every one."""
        for _ in range(times):
            self.scheduler.turn()
            self.decoder.check()

    def version(self, number: int) -> PolicyVersion:
        return PolicyVersion(incarnation=1, number=number, digest=f"d{number}")

    def commit(self, mode: InFlightMode, number: int | None = None) -> None:
        number = number or self.live + 1
        version = self.version(number)
        weights = self.scheduler.take_staging()
        self.fill(weights, number)
        self.scheduler.received(weights, Manifest(version=version, parent=None, tensors=()))
        self.scheduler.verified(weights, version.digest)
        answer = self.scheduler.commit(version, mode)
        while not answer.done():
            self.turn()
        self.live = number

    def submit(
        self,
        prompt: tuple[int, ...],
        new: int,
        *,
        sampling: SamplingParams | None = None,
        stop: tuple[int, ...] = (),
        priority: int = 0,
        pinned: PolicyVersion | None = None,
        barrier: Barrier | None = None,
        name: str | None = None,
        seed: int | None = None,
        routes: bool = False,
    ) -> Stream:
        number = next(self.names)
        request = GenerateRequest(
            request_id=name or f"r{number}",
            prompt_ids=np.array(prompt, np.int32),
            sampling=sampling or SamplingParams(),
            seed=number if seed is None else seed,
            max_new_tokens=new,
            stop_ids=stop,
            priority=priority,
            session_key="s",
            purpose=Purpose.EVALUATION if pinned else Purpose.ROLLOUT,
            pinned=pinned,
            barrier=barrier,
            want_routes=routes,
        )
        stream: Stream = asyncio.Queue()
        self.scheduler.submit([request], stream)
        self.streams.append((request, stream))
        return stream

    def abort(self, which: int) -> None:
        if self.streams:
            self.scheduler.abort([self.streams[which % len(self.streams)][0].request_id])

    def finish(self) -> list[Generated]:
        """Everything that was submitted since the last time, in that order; nothing may starve."""
        patience = 64 + 4 * sum(len(each.prompt_ids) + each.max_new_tokens for each, _ in self.streams)
        while (status := self.scheduler.status()).running or status.queued:
            self.turn()
            patience -= 1
            assert patience, f"{status.running} running and {status.queued} queued never end"
        self.turn()
        streams, self.streams = self.streams, []
        return [
            Generated(chunks=[stream.get_nowait() for _ in range(stream.qsize())], request=request)
            for request, stream in streams
        ]
