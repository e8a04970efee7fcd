"""Running sequences: each step computes what the planner chose, and samples a token where a context is complete.

Where the planner let drafts be computed too, a step samples after each of them as if it had been alone, and goes on
with the sequence while what it sampled is what was drafted: the tokens are those of one step after the other.

Letters: B rows of a step, T its tokens, N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
from torch import Tensor

from fathom.core.ids import EngineId
from fathom.core.ports.engine import ScoreRequest
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.embedded.messages import Failure, FailureKind, RequestFailure, Streamed
from fathom.rollout.engines.embedded.server.decode.chunk_writer import ChunkWriter
from fathom.rollout.engines.embedded.server.decode.contexts import Contexts
from fathom.rollout.engines.embedded.server.decode.draft.proposer import Proposer
from fathom.rollout.engines.embedded.server.decode.draft.speculation import Speculation
from fathom.rollout.engines.embedded.server.decode.endings import Endings
from fathom.rollout.engines.embedded.server.decode.forward import Batch, Forward, Scores
from fathom.rollout.engines.embedded.server.decode.route_book import RouteBook
from fathom.rollout.engines.embedded.server.decode.sampler import Draw, draw
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.decode.step_planner import StepPlan, StepPlanner
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.kv.kv_memory import KvMemory
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet
from fathom.rollout.engines.stop_strings import Decode
from fathom.rollout.engines.uniforms import uniforms


@final
class Decoder:
    """Slots and the forward over them. All methods run on one thread; between any two the tokens are at a boundary."""

    def __init__(
        self,
        engine: EngineId,
        forward: Forward,
        *,
        slots: int,
        max_tokens: int,
        step_tokens: int,
        pages: int,
        page_tokens: int,
        decode: Decode | None = None,
        proposer: Proposer | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """`slots` sequences of at most `max_tokens` tokens; `step_tokens` in one forward; `pages` of KV memory;
        `decode` for stop strings (None: no request has any); `proposer` drafts up to `draft_tokens` tokens for each
        sequence (None: no speculation)."""
        self.vocab_size = forward.vocab_size
        self._forward = forward
        self._table = SlotTable(slots, max_tokens)
        self._memory = KvMemory(
            slots=slots, max_tokens=max_tokens, pages=pages, page_tokens=page_tokens, copy_page=forward.copy_page
        )
        self._contexts = Contexts(self._table, self._memory)
        self._speculation = None if proposer is None else Speculation(self._table, proposer, draft_tokens, step_tokens)
        self._planner = StepPlanner(self._table, self._memory, self._contexts, step_tokens, self._speculation)
        self._endings = Endings(self._table, forward.vocab_size, decode)
        self._routes = RouteBook(self._table, self._memory, forward)
        self._writer = ChunkWriter(engine, forward, self._table, self._routes)
        self._jobs: dict[int, Job] = {}
        self._broken: set[int] = set()

    @property
    def has_experts(self) -> bool:
        """It can record routes."""
        return self._forward.has_experts

    @property
    def jobs(self) -> dict[int, Job]:
        """Running jobs by slot."""
        return self._jobs

    def can_start(self, job: Job) -> bool:
        """There is a slot, and memory for the job beside those that have a slot and no memory yet.

        So what cannot run waits in the queue, where whoever comes first goes first.
        """
        table, memory = self._table, self._memory
        waiting = table.length[table.active & (memory.held == 0)]
        lengths = np.append(waiting, len(job.request.prompt_ids))
        return table.free > 0 and int((-(-lengths // memory.page_tokens)).sum()) <= memory.available

    def start(self, job: Job) -> None:
        """Give a job a free slot; `can_start` must have said so."""
        slot = self._table.open(job.request)
        self._endings.open(slot, job.request)
        self._routes.open(slot, wanted=job.request.want_routes)
        if self._speculation is not None:
            self._speculation.open(slot, job.request)
        self._jobs[slot] = job

    def step(self, live: WeightSet) -> list[int]:
        """One forward for each set of weights in use. Returns slots whose sequence has ended."""
        ended: list[int] = []
        for weights, part in self._by_weights(self._planner.plan(self._jobs, live), live):
            ended += self._compute(weights, part)
        return ended

    def score(self, weights: WeightSet, request: ScoreRequest) -> Scores:
        """Log-probabilities of given tokens and ids."""
        return self._forward.score(weights, request)

    def switch(self, live: WeightSet, recompute: bool) -> None:
        """Go on under new live weights, perhaps computing all contexts again. What is cached is forgotten."""
        self._forward.use(live)
        self._contexts.clear()
        for slot, job in self._jobs.items():
            if job.pinned is None and recompute:
                self._contexts.release(slot)
            elif job.pinned is None:
                self._contexts.mix(slot)
            if job.pinned is None and not self._table.computed[slot] and not self._table.sampled(slot):
                self._routes.restart(slot)

    def unsent(self) -> list[int]:
        """Slots with tokens that were not sent."""
        return np.flatnonzero(self._table.active & (self._table.length > self._table.sent)).tolist()

    def flush(self, slot: int) -> Streamed:
        """The tokens of a running sequence that were not sent."""
        return self._writer.chunk(slot, self._jobs[slot], None)

    def finish(self, slot: int, aborted: bool = False) -> Streamed:
        """Free the slot; the last of the sequence: its remaining tokens and why it ended."""
        job = self._jobs.pop(slot)
        broken = slot in self._broken
        self._broken.discard(slot)
        if not broken:
            self._contexts.remember(slot)
        self._contexts.release(slot)
        self._table.close(slot)
        if broken:
            reason = f"log-probabilities of {job.request.request_id} are not finite: the weights have diverged"
            failure = Failure(kind=FailureKind.FAILED, reason=reason)
            return RequestFailure(request_id=job.request.request_id, failure=failure)
        reason = FinishReason.ABORTED if aborted else self._endings.reason(slot, job.request.max_new_tokens)
        return self._writer.chunk(slot, job, reason)

    def finish_waiting(self, job: Job) -> Streamed:
        """The only chunk of a generation that was aborted before it had a slot."""
        return self._writer.unstarted(job)

    def check(self) -> None:
        """Every page of KV memory is accounted for. Raises `PageLeakError`."""
        self._memory.check()

    def _by_weights(self, plan: StepPlan, live: WeightSet) -> Iterator[tuple[WeightSet, StepPlan]]:
        """A plan by the weights that serve its rows, the live ones first."""
        pinned = self._table.pinned[plan.rows]
        if not pinned.any():
            if len(plan.rows):
                yield live, plan
            return
        weights = [self._jobs[slot].pinned or live for slot in plan.rows.tolist()]
        for each in sorted(dict.fromkeys(weights), key=lambda each: each is not live):
            chosen = np.array([its is each for its in weights])
            yield each, StepPlan(rows=plan.rows[chosen], lengths=plan.lengths[chosen], drafts=plan.drafts[chosen])

    def _compute(self, weights: WeightSet, plan: StepPlan) -> list[int]:
        """One forward, and tokens for each row whose context it completes. Returns rows that ended."""
        table, rows, lengths = self._table, plan.rows, plan.lengths
        complete = table.computed[rows] + lengths == table.length[rows]
        batch = self._batch(plan, complete)
        self._writer.name(weights)
        logits = self._forward.logits(weights, batch)
        self._contexts.advance(rows, lengths, weights.number)
        ended = self._sample(logits, rows[complete], plan.drafts[complete], weights) if complete.any() else []
        self._routes.collect(rows)
        for slot in rows[lengths > 1].tolist():
            self._contexts.remember(slot)
        return ended

    def _batch(self, plan: StepPlan, complete: np.ndarray) -> Batch:
        rows, lengths = plan.rows, plan.lengths + plan.drafts
        starts, ends = self._table.computed[rows], np.cumsum(lengths)
        positions = _spans(starts, lengths)
        return Batch(
            tokens=self._table.tokens[np.repeat(rows, lengths), positions],
            positions=positions,
            tables=self._memory.tables(rows),
            starts=starts,
            lengths=lengths,
            sampled=_spans(ends[complete] - plan.drafts[complete] - 1, plan.drafts[complete] + 1),
            routed=self._routes.wants(rows),
        )

    def _sample(self, logits: Tensor, rows: np.ndarray, drafts: np.ndarray, weights: WeightSet) -> list[int]:
        """Draw after each row and each of its drafts; write down what follows from tokens drawn. Returns rows that
        ended."""
        table, counts = self._table, drafts + 1
        jobs = [self._jobs[slot] for slot in np.repeat(rows, counts).tolist()]
        drawn = draw(
            logits,
            [job.request.sampling for job in jobs],
            uniforms(np.repeat(table.seed[rows], counts), _spans(table.length[rows], counts)),
            any(job.request.want_raw_logprobs for job in jobs),
        )
        first, ended = np.cumsum(counts) - counts, np.zeros(len(rows), np.bool_)
        given, going = np.zeros(len(rows), np.int64), np.arange(len(rows))
        while len(going):
            at, slots = first[going] + given[going], rows[going]
            right = table.tokens[slots, table.length[slots]] == drawn.token_ids[at]
            ended[going] = self._append(drawn, at, slots, jobs, weights)
            given[going] += 1
            going = going[right & (given[going] <= drafts[going]) & ~ended[going]]
            self._contexts.advance(rows[going], np.ones(len(going), np.int64), weights.number)
        if self._speculation is not None:
            self._speculation.settle(rows, drafts, given - 1)
        return rows[ended].tolist()

    def _append(self, drawn: Draw, at: np.ndarray, rows: np.ndarray, jobs: list[Job], weights: WeightSet) -> np.ndarray:
        """Write down one token for each row, the one drawn `at` there. bool [B]: it was the last of its row."""
        table, logprobs = self._table, drawn.logprobs[at]
        if drawn.raw_logprobs is not None:
            table.raw_logprobs[rows, table.length[rows]] = drawn.raw_logprobs[at]
        table.append(rows, drawn.token_ids[at], logprobs, weights.number)
        if drawn.kept is not None:
            _keep(drawn.kept, at, jobs)
        bad = ~np.isfinite(logprobs)
        self._broken.update(rows[bad].tolist())
        return bad | self._endings.ended(rows)


def _spans(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: `counts[b]` numbers from `begins[b]` on, one span after the other."""
    return np.arange(counts.sum()) + np.repeat(begins - (np.cumsum(counts) - counts), counts)


def _keep(kept: KeptSets, at: np.ndarray, jobs: list[Job]) -> None:
    """Hand each job that truncates the kept set of its new token, the one drawn `at` there."""
    for index in at.tolist():
        if jobs[index].request.sampling.truncates:
            jobs[index].kept.append(kept.ids[kept.offsets[index] : kept.offsets[index + 1]])
