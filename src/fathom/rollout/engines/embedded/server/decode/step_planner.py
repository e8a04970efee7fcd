"""What the next forward computes: tokens of sequences that decode first, then chunks of contexts, oldest group first.

With speculation, drafts take what is then left of a small step, and pages that nobody is about to need.

Pages are given in the same order. When they run out, the sequence served last gives up all of its pages; its tokens
stay, and its context is computed again when there is room. A context is begun only when all of it fits, and none
overtakes one that does not: so whoever is first always gets on, and nobody starves.

Letters: B rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.rollout.engines.embedded.server.decode.contexts import Contexts, Origin, origin_of
from fathom.rollout.engines.embedded.server.decode.draft.speculation import Speculation
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.kv.kv_memory import KvMemory
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Rows of one step, those that decode first."""

    rows: np.ndarray
    """int64 [B]: slots."""
    lengths: np.ndarray
    """int64 [B]: tokens to compute of each."""
    drafts: np.ndarray
    """int64 [B]: drafted tokens to compute after those."""


@final
class StepPlanner:
    """Chooses rows and gives them pages."""

    def __init__(
        self,
        table: SlotTable,
        memory: KvMemory,
        contexts: Contexts,
        step_tokens: int,
        speculation: Speculation | None,
    ) -> None:
        """At most `step_tokens` tokens are computed at once; each slot can decode one of them, with some to spare."""
        if step_tokens <= len(table.active):
            raise ValueError(
                f"{step_tokens} tokens per step leave no room for prompts beside {len(table.active)} slots"
            )
        self._table = table
        self._memory = memory
        self._contexts = contexts
        self._step_tokens = step_tokens
        self._speculation = speculation

    def plan(self, jobs: Mapping[int, Job], live: WeightSet) -> StepPlan:
        """The next step of the running `jobs` (by slot). Empty: nothing runs."""
        table = self._table
        rows = table.ranked()
        decodes = (self._memory.held[rows] > 0) & (table.computed[rows] == table.length[rows] - 1)
        chosen = dict.fromkeys(rows[decodes].tolist(), 1)
        self._make_room(rows, rows[decodes], chosen)
        decoding = len(chosen)
        self._add_chunks(rows[~decodes], chosen, jobs, live)
        rows, lengths = np.array(list(chosen), np.int64), np.array(list(chosen.values()), np.int64)
        drafts = np.zeros(len(rows), np.int64)
        drafts[:decoding] = self._draft(rows[:decoding], int(lengths.sum()))
        return StepPlan(rows=rows, lengths=lengths, drafts=drafts)

    def _make_room(self, ranked: np.ndarray, decoding: np.ndarray, chosen: dict[int, int]) -> None:
        """Give each row that decodes the page for its next token, at the expense of those served last."""
        memory = self._memory
        lacking = decoding[memory.held[decoding] * memory.page_tokens < self._table.length[decoding]]
        for slot in lacking.tolist():
            while slot in chosen and not memory.grow(slot):
                holders = ranked[memory.held[ranked] > 0]
                self._preempt(int(holders[-1]), chosen)

    def _preempt(self, slot: int, chosen: dict[int, int]) -> None:
        self._contexts.remember(slot)
        self._contexts.release(slot)
        chosen.pop(slot, None)

    def _add_chunks(self, rows: np.ndarray, chosen: dict[int, int], jobs: Mapping[int, Job], live: WeightSet) -> None:
        """Fill the step with contexts to compute, as far as tokens and pages go."""
        table, memory = self._table, self._memory
        room, full = self._step_tokens - len(chosen), False
        ahead = [slot for slot in rows.tolist() if memory.held[slot]]
        for slot in rows.tolist():
            if room <= 0:
                break
            if not memory.held[slot]:
                job = jobs[slot]
                origin = origin_of(job, live)
                hit = self._contexts.find(slot, origin)
                if full or self._worth_waiting(slot, origin, hit.tokens(memory.page_tokens), ahead):
                    continue
                full = not self._contexts.begin(slot, job, origin, hit, self._spare())
                if full:
                    continue
                ahead.append(slot)
            take = min(int(table.length[slot] - table.computed[slot]), room)
            chosen[slot] = take
            room -= take

    def _draft(self, rows: np.ndarray, planned: int) -> np.ndarray:
        """int64 [B]: tokens drafted of rows that decode; none that has no page."""
        if self._speculation is None or not len(rows):
            return np.zeros(len(rows), np.int64)
        memory, length = self._memory, self._table.length[rows]
        most = self._speculation.wanted(rows, planned)
        lacking = memory.held[rows] * memory.page_tokens < length + most
        for slot, needed in zip(rows[lacking].tolist(), (length + most)[lacking].tolist(), strict=True):
            while memory.held[slot] * memory.page_tokens < needed and memory.available > self._spare():
                memory.grow(slot)
        return self._speculation.draft(rows, np.minimum(most, memory.held[rows] * memory.page_tokens - length))

    def _spare(self) -> int:
        """Pages to leave when a context begins: one for each sequence that needs more, lest it soon give way."""
        table, memory = self._table, self._memory
        growing = (memory.held > 0) & (memory.held * memory.page_tokens < table.limit - 1)
        return int(np.count_nonzero(growing))

    def _worth_waiting(self, slot: int, origin: Origin, found: int, ahead: list[int]) -> bool:
        """True when a row ahead is about to compute much of what this one lacks: a page, or half of it."""
        table = self._table
        needed = int(table.length[slot]) - 1
        others = [other for other in ahead if self._contexts.origin(other) == origin]
        if found >= needed or not others:
            return False
        differs = table.tokens[others, :needed] != table.tokens[slot, :needed]
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), needed)
        gain = int(np.minimum(shared, table.length[others]).max()) - found
        return gain >= self._memory.page_tokens or 2 * gain >= needed - found
