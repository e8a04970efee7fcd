"""Cuts what was sampled since the last time out of the books, as chunks of the port."""

from __future__ import annotations

import time
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.embedded.server.decode.forward import Forward
from fathom.rollout.engines.embedded.server.decode.route_book import RouteBook
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet


@final
class ChunkWriter:
    """Writes chunks for one slot table."""

    def __init__(self, engine: EngineId, forward: Forward, table: SlotTable, routes: RouteBook) -> None:
        self._engine = engine
        self._dtype, self._kernels = forward.dtype, forward.kernels
        self._table = table
        self._routes = routes
        self._names: dict[int, PolicyVersion] = {}

    def name(self, weights: WeightSet) -> None:
        """Learn the full name of a version that is about to make tokens."""
        if weights.version is not None:
            self._names[weights.number] = weights.version

    def chunk(self, slot: int, job: Job, finish: FinishReason | None) -> GenerateChunk:
        """The tokens of a slot that were not sent before; with the end when `finish` is given."""
        table = self._table
        begin, end = int(table.sent[slot]), int(table.length[slot])
        new = (slot, slice(begin, end))
        table.sent[slot] = end
        policy, kv = table.policy_version[new].copy(), table.kv_version[new].copy()
        return GenerateChunk(
            request_id=job.request.request_id,
            token_ids=table.tokens[new].copy(),
            logprobs=table.logprobs[new].copy(),
            policy_version=policy,
            kv_version=kv,
            versions=tuple(self._names[number] for number in sorted({*policy.tolist(), *kv.tolist()})),
            kept=_take_kept(job) if job.request.sampling.truncates else None,
            raw_logprobs=table.raw_logprobs[new].copy() if job.request.want_raw_logprobs else None,
            routes=self._routes.take(slot),
            end=self._end(slot, job, finish) if finish is not None else None,
        )

    def unstarted(self, job: Job) -> GenerateChunk:
        """The only chunk of a generation that was aborted while it waited."""
        empty = np.empty(0, np.int32)
        request = job.request
        return GenerateChunk(
            request_id=request.request_id,
            token_ids=empty,
            logprobs=np.empty(0, np.float32),
            policy_version=empty,
            kv_version=empty,
            versions=(),
            kept=_take_kept(job) if request.sampling.truncates else None,
            raw_logprobs=np.empty(0, np.float32) if request.want_raw_logprobs else None,
            routes=None,
            end=self._ending(job, FinishReason.ABORTED, request.prompt_ids, drafted=0, accepted=0),
        )

    def _end(self, slot: int, job: Job, finish: FinishReason) -> GenerateEnd:
        table = self._table
        drafted, accepted = int(table.drafted[slot]), int(table.accepted[slot])
        return self._ending(job, finish, table.tokens[slot, : table.prompt[slot]], drafted=drafted, accepted=accepted)

    def _ending(
        self, job: Job, finish: FinishReason, executed: np.ndarray, *, drafted: int, accepted: int
    ) -> GenerateEnd:
        now_s = time.monotonic()
        started_s = now_s if job.started_s is None else job.started_s
        return GenerateEnd(
            finish_reason=finish,
            engine=self._engine,
            dtype=self._dtype,
            kernels=self._kernels,
            prompt_hash=blake3(executed.tobytes()).hexdigest(),
            cached_tokens=job.cached_tokens,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            queue_s=started_s - job.arrived_s,
            generate_s=now_s - started_s,
        )


def _take_kept(job: Job) -> KeptSets:
    offsets = np.cumsum([0, *map(len, job.kept)], dtype=np.int64)
    ids = np.concatenate([*job.kept, np.empty(0, np.int32)]).astype(np.int32)
    job.kept.clear()
    return KeptSets(offsets=offsets, ids=ids)
