"""What the members of a started group are asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from fathom.config.run import RunConfig
from fathom.core.ports.engine import Barrier
from fathom.core.records.sampling import Purpose
from fathom.ledger.events import GroupStarted
from fathom.rollout.episode import EpisodePlan
from fathom.run.resolve import PromptedTask
from fathom.run.rollouts.seeds import request_seed


@final
class Dispatch:
    """Makes plans. The same occurrence, member and attempt always get the same plan, but for their names."""

    def __init__(self, config: RunConfig, tasks: Sequence[PromptedTask]) -> None:
        self._config = config
        self._tasks = tasks
        self._sampling = config.rollout.sampling.params()

    def plans(self, wave: Sequence[tuple[GroupStarted, int]]) -> list[list[EpisodePlan]]:
        """Plans of groups that start together, given with the indices of their tasks.

        Returned in units that arrive together: single trajectories, or the whole wave when the run is deterministic;
        then the engine starts them together too, and neither order nor batching depends on timing.
        """
        if not wave:
            return []
        if not self._config.deterministic:
            return [[self._plan(*start, member, None)] for start in wave for member in range(len(start[0].members))]
        barrier = Barrier(name=wave[0][0].group, size=sum(len(started.members) for started, _ in wave))
        return [[self._plan(*start, member, barrier) for start in wave for member in range(len(start[0].members))]]

    def _plan(self, started: GroupStarted, task: int, member: int, barrier: Barrier | None) -> EpisodePlan:
        place = started.occurrence.epoch * len(self._tasks) + started.occurrence.index
        return EpisodePlan(
            group=started.group,
            member=member,
            occurrence=started.occurrence,
            attempt=started.attempt,
            task=self._tasks[task].task,
            prompt_ids=self._tasks[task].prompt_ids,
            sampling=self._sampling,
            max_new_tokens=self._config.rollout.max_new_tokens,
            seed=request_seed(self._config.seed, place, member, started.attempt),
            priority=place,
            purpose=Purpose.ROLLOUT,
            pinned=None,
            barrier=barrier,
        )
