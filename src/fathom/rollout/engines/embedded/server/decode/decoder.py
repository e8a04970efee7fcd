"""Running sequences: each step prefills what is new, then samples one more token for everything that runs.

Letters: B rows of a forward, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import final

import numpy as np
from torch import Tensor

from fathom.core.ids import EngineId
from fathom.core.ports.engine import ScoreRequest
from fathom.core.records.sampling import FinishReason
from fathom.rollout.engines.embedded.messages import Failure, FailureKind, RequestFailure, Streamed
from fathom.rollout.engines.embedded.server.decode.chunk_writer import ChunkWriter
from fathom.rollout.engines.embedded.server.decode.compute import Compute
from fathom.rollout.engines.embedded.server.decode.prefixes import Prefixes, PrefixKey, prefix_key
from fathom.rollout.engines.embedded.server.decode.sampler import Draw, draw
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet
from fathom.rollout.engines.uniforms import uniforms

_PREFILL_TOKENS = 4096
"""A prefill computes at most this many tokens (or one longer context) at once: decoding never waits for long."""


@final
class Decoder:
    """Slots and the forward over them. All methods run on one thread; between any two the tokens are at a boundary."""

    def __init__(self, engine: EngineId, compute: Compute, slots: int, max_tokens: int) -> None:
        self.vocab_size = compute.vocab_size
        self._compute = compute
        self._table = SlotTable(slots, max_tokens, compute.vocab_size)
        self._jobs: dict[int, Job] = {}
        self._prefixes = Prefixes()
        self._broken: set[int] = set()
        self._writer = ChunkWriter(engine, compute.dtype, self._table)

    @property
    def free(self) -> int:
        """Sequences that could be started now."""
        return self._table.free

    @property
    def jobs(self) -> dict[int, Job]:
        """Running jobs by slot."""
        return self._jobs

    def start(self, job: Job, live: WeightSet) -> None:
        """Give a job a free slot: the one that holds its prompt already, if there is such a one."""
        table = self._table
        holder = self._prefixes.find(prefix_key((job.pinned or live).number, job.request))
        if holder is None or table.active[holder]:
            slot = table.choose(self._prefixes if job.request.barrier is None else ())
            self._prefixes.forget(slot)
        else:
            slot = holder
        table.open(slot, job.request)
        self._jobs[slot] = job
        job.started_s = time.monotonic()

    def prefill(self, live: WeightSet) -> list[int]:
        """Compute contexts that are not in the cache, at most `_PREFILL_TOKENS` tokens of each set of weights.

        Returns slots whose sequence has ended.
        """
        ended: list[int] = []
        for weights, rows in self._by_weights(self._table.to_prefill(), live):
            self._writer.name(weights)
            batch, later = self._pack(rows, weights)
            if batch:
                chosen = np.array(batch)
                logits = self._compute.prefill(
                    weights, chosen, [self._table.tokens[slot, : self._table.length[slot]] for slot in batch]
                )
                self._table.kv_oldest[chosen] = weights.number
                for slot in batch:
                    if self._unsampled(slot):
                        self._prefixes.remember(prefix_key(weights.number, self._jobs[slot].request), slot)
                ended += self._sample(logits, chosen, weights)
            self._inherit(later, weights)
        return ended

    def decode(self, live: WeightSet) -> list[int]:
        """Sample one more token for every sequence whose context is in the cache. Returns slots that ended."""
        ended: list[int] = []
        for weights, rows in self._by_weights(self._table.to_decode(), live):
            self._writer.name(weights)
            at = self._table.length[rows] - 1
            logits = self._compute.decode(weights, rows, self._table.tokens[rows, at], at)
            ended += self._sample(logits, rows, weights)
        return ended

    def score(self, weights: WeightSet, request: ScoreRequest) -> np.ndarray:
        """float32 [N]: log-probabilities of given tokens."""
        return self._compute.score(weights, request)

    def switch(self, live: WeightSet, recompute: bool) -> list[int]:
        """Go on under new live weights. No prefix survives. Returns slots that ended while contexts were recomputed."""
        self._compute.use(live)
        self._prefixes.clear()
        ended: list[int] = []
        if recompute:
            stale = {slot for slot, job in self._jobs.items() if job.pinned is None}
            self._table.computed[list(stale)] = 0
            while stale & set(self._table.to_prefill().tolist()):
                ended += self.prefill(live)
        return ended

    def unsent(self) -> list[int]:
        """Slots with tokens that were not sent."""
        return np.flatnonzero(self._table.active & (self._table.length > self._table.sent)).tolist()

    def flush(self, slot: int) -> Streamed:
        """The tokens of a running sequence that were not sent."""
        return self._writer.chunk(slot, self._jobs[slot], None)

    def finish(self, slot: int, aborted: bool = False) -> Streamed:
        """Free the slot; the last of the sequence: its remaining tokens and why it ended."""
        job, table = self._jobs.pop(slot), self._table
        row = np.array([slot])
        table.close(slot)
        if slot in self._broken:
            self._broken.remove(slot)
            self._prefixes.forget(slot)
            reason = f"log-probabilities of {job.request.request_id} are not finite: the weights have diverged"
            failure = Failure(kind=FailureKind.FAILED, reason=reason)
            return RequestFailure(request_id=job.request.request_id, failure=failure)
        if aborted:
            reason = FinishReason.ABORTED
        elif table.stopped(row)[0]:
            reason = FinishReason.STOP
        elif table.length[slot] - table.prompt[slot] >= job.request.max_new_tokens:
            reason = FinishReason.LENGTH
        else:
            reason = FinishReason.CONTEXT
        return self._writer.chunk(slot, job, reason)

    def finish_waiting(self, job: Job) -> Streamed:
        """The only chunk of a generation that was aborted before it had a slot."""
        return self._writer.unstarted(job)

    def _by_weights(self, rows: np.ndarray, live: WeightSet) -> Iterator[tuple[WeightSet, np.ndarray]]:
        """Rows grouped by the weights that serve them, the live ones first."""
        pinned: dict[int, WeightSet] = {}
        for slot in rows.tolist():
            if (weights := self._jobs[slot].pinned) is not None and weights is not live:
                pinned[slot] = weights
        if unpinned := [slot for slot in rows.tolist() if slot not in pinned]:
            yield live, np.array(unpinned)
        for weights in dict.fromkeys(pinned.values()):
            yield weights, np.array([slot for slot, its in pinned.items() if its is weights])

    def _pack(self, rows: np.ndarray, weights: WeightSet) -> tuple[list[int], list[int]]:
        """Slots to compute in this prefill, and slots whose prompt can be copied after it. Others wait for room."""
        batch: list[int] = []
        later: list[int] = []
        keys: set[PrefixKey | None] = set()
        room = _PREFILL_TOKENS
        for slot in rows.tolist():
            size = int(self._table.length[slot])
            key = prefix_key(weights.number, self._jobs[slot].request) if self._unsampled(slot) and size > 1 else None
            if key is not None and (key in keys or self._prefixes.find(key) is not None):
                later.append(slot)
            elif size <= room or not batch:
                batch.append(slot)
                room -= size
                keys.add(key)
        return batch, later

    def _inherit(self, slots: list[int], weights: WeightSet) -> None:
        """Copy all of a prompt but its last token, which is then decoded like any other."""
        for slot in slots:
            job, size = self._jobs[slot], int(self._table.prompt[slot]) - 1
            holder = self._prefixes.find(prefix_key(weights.number, job.request))
            if holder is None:
                raise AssertionError("a prompt to be copied was computed before")
            if holder != slot:
                self._compute.copy_prefix(holder, [slot], size)
            self._table.computed[slot] = size
            self._table.kv_oldest[slot] = weights.number
            job.cached_tokens = size

    def _unsampled(self, slot: int) -> bool:
        return bool(self._table.length[slot] == self._table.prompt[slot])

    def _sample(self, logits: Tensor, rows: np.ndarray, weights: WeightSet) -> list[int]:
        """Draw one token per row and write it down. Returns rows that ended."""
        table, jobs = self._table, [self._jobs[slot] for slot in rows.tolist()]
        drawn = draw(
            logits,
            [job.request.sampling for job in jobs],
            uniforms(table.seed[rows], table.length[rows]),
            any(job.request.want_raw_logprobs for job in jobs),
        )
        if drawn.raw_logprobs is not None:
            table.raw_logprobs[rows, table.length[rows]] = drawn.raw_logprobs
        table.append(rows, drawn.token_ids, drawn.logprobs, weights.number)
        _keep(drawn, jobs)
        bad = ~np.isfinite(drawn.logprobs)
        self._broken.update(rows[bad].tolist())
        return rows[bad | table.stopped(rows) | table.full(rows)].tolist()


def _keep(drawn: Draw, jobs: list[Job]) -> None:
    """Hand each job that truncates the kept set of its new token."""
    if drawn.kept is None:
        return
    for index, job in enumerate(jobs):
        if job.request.sampling.truncates:
            job.kept.append(drawn.kept.ids[drawn.kept.offsets[index] : drawn.kept.offsets[index + 1]])
