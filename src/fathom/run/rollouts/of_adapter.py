"""Writes into each trajectory which adapter was active."""

from __future__ import annotations

from typing import final

from msgspec.structs import replace

from fathom.core.adapter import AdapterIdentity
from fathom.core.records.trajectory import Trajectory
from fathom.rollout.episode import EpisodePlan
from fathom.run.parts import Runner


@final
class OfAdapter:
    """A runner whose engines compute with an adapter, or with a model that it was merged into."""

    def __init__(self, runner: Runner, adapter: AdapterIdentity) -> None:
        self._runner = runner
        self._label = adapter.label

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """See `Runner.run`."""
        trajectory = await self._runner.run(plan)
        return replace(trajectory, header=replace(trajectory.header, adapter=self._label))
