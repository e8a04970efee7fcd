"""The run, as a page.

    source --occurrence--> group --trajectories--> buffer --batch--> trainer --weights--> engines
      ^                                                                                      |
      +------ a start waits until the staleness bound admits one more group <----------------+

`admit` starts groups, each trajectory is a task of its own, `train` takes batches, `watch` hears from the engines.
They share one state machine, the buffer, and wake each other by `_changed`. Staleness bound 0 is the synchronous run:
the same loops, of which always one waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from fathom.buffer.group_buffer import Drained, Fact, Taken, Waiting
from fathom.core.errors import RunStoppedError, StepStoppedError
from fathom.core.ids import PolicyVersion
from fathom.core.records.row import Row
from fathom.core.records.step import StepOutcome, TrainBatch
from fathom.core.records.trajectory import Trajectory
from fathom.ledger.events import CheckpointSaved, GroupStarted, LoopSampled, StepTaken
from fathom.rollout.episode import EpisodePlan
from fathom.run.history.checkpoint import LoopState
from fathom.run.parts import Parts
from fathom.run.rollouts.dispatch import Dispatch

_SAMPLE_S = 1.0


@final
class Pipeline:
    """Drives one incarnation of a run, from its first publication to its end."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._buffer = parts.buffer
        self._clock = parts.buffer.clock
        self._trajectories: set[asyncio.Task[None]] = set()
        self._dispatch = Dispatch(parts.config, parts.tasks)
        self._changed = asyncio.Event()
        self._trainer_waits_for = ""
        self._source_waits_for = ""
        self._serving: PolicyVersion | None = None
        self._last_evaluated: PolicyVersion | None = None
        self._saved = self._clock.version
        self._evaluated = parts.evaluated
        self._settled = self._loop_state()
        parts.stop.on_ask(self._wake)

    async def run(self) -> str:
        """Run until the steps are taken, the data end, or a stop is asked; returns `steps`, `data` or `stopped`.

        The trainer's loop is the only finite one. Any loop that fails ends the run with its error.
        """
        await self._deliver_now()
        if self._evaluation_due():
            await self._evaluate()
        if self._p.fresh:
            self._settled = self._loop_state()
            await self._checkpoint()
        try:
            async with asyncio.TaskGroup() as loops:
                forever = self._admit(loops), self._watch(), self._sample(), self._p.desk.serve()
                endless = [loops.create_task(loop) for loop in forever]
                reason = await self._train()
                for task in (*endless, *self._trajectories):
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others only ended because of it
        await self._checkpoint()
        self._record(self._buffer.stop())
        if reason != "stopped":
            await self._deliver_now()
            await self._evaluate()
        return "stopped" if self._p.stop.asked else reason

    async def _admit(self, loops: asyncio.TaskGroup) -> None:
        """Start groups. Waits for room under the bound and in flight; woken by arrivals, publications and engines."""
        while True:
            wave: list[tuple[GroupStarted, int]] = []
            while not (reason := self._why_not_start()) and (draw := self._buffer.source.next()) is not None:
                started = self._buffer.start(draw.occurrence, self._p.tasks[draw.task].task.id)
                self._p.recorder.record(started)
                wave.append((started, draw.task))
            for plans in self._dispatch.plans(wave):
                task = loops.create_task(self._roll_out(plans))
                self._trajectories.add(task)
                task.add_done_callback(self._trajectories.discard)
            self._source_waits_for = reason or "the data are exhausted"
            if wave:
                self._wake()
            await self._changed.wait()

    async def _roll_out(self, plans: Sequence[EpisodePlan]) -> None:
        """Play trajectories and hand them to the buffer in the order of the plans. Waits for engine and grader."""
        for trajectory in await asyncio.gather(*(self._p.runner.run(plan) for plan in plans)):
            self._arrive(trajectory)

    async def _train(self) -> str:
        """Take steps. Waits for a batch; woken by arrivals."""
        config = self._p.config.trainer
        while self._clock.version < config.steps:
            began = time.monotonic()
            taken = await self._next_batch()
            if taken is None:
                return "stopped" if self._p.stop.asked else "data"
            self._record(taken.facts)
            try:
                await self._train_on(taken.batch, waited_s=time.monotonic() - began)
            except StepStoppedError:
                return "stopped"
            if self._clock.version - self._saved >= self._p.config.checkpoint.every_steps:
                await self._checkpoint()
            if self._evaluation_due():
                await self._evaluate()
        return "steps"

    async def _train_on(self, batch: TrainBatch, waited_s: float) -> None:
        """The steps on one batch, each recorded before its version can be published."""
        async for outcome in self._p.learner.steps(batch, self._clock.version):
            self._buffer.step(outcome)
            digest = await self._p.learner.digest()
            self._p.recorder.step(_step_taken(outcome, batch, digest, waited_s), outcome.rows)
            if self._clock.publication_due:
                await self._publish([row for group in batch.groups for row in group.rows])
        self._record(self._buffer.settle())
        self._settled = self._loop_state()
        self._p.recorder.commit()
        self._wake()

    async def _next_batch(self) -> Taken | None:
        """The next batch, or None when there will be none."""
        while not self._p.stop.asked:
            answer = self._buffer.take(time.time())
            match answer:
                case Taken():
                    self._trainer_waits_for = ""
                    return answer
                case Drained():
                    self._record(answer.facts)
                    return None
                case Waiting():
                    self._record(answer.facts)
                    self._trainer_waits_for = answer.reason
                    if answer.facts:
                        self._wake()  # what was dropped on the way has made room
                        continue
                    if self._clock.publication_due and self._p.delivery.idle:
                        await self._publish(())  # the one before failed
                        continue
            await self._changed.wait()
        return None

    async def _watch(self) -> None:
        """Pass on that engines came or went; ends the run when too few are left. Waits for the fleet."""
        while True:
            await self._p.fleet.changed()
            self._wake()

    async def _sample(self) -> None:
        """Write down how the loops stand, once a second; also makes the history durable in between steps."""
        while True:
            buffer = self._buffer
            self._p.recorder.record(
                LoopSampled(
                    in_flight_trajectories=buffer.running_trajectories,
                    in_flight_groups=buffer.running_groups,
                    buffered_groups=buffer.buffered_groups,
                    oldest_version=buffer.oldest_version,
                    trainer_waits_for=self._trainer_waits_for,
                    source_waits_for=self._source_waits_for,
                )
            )
            self._p.recorder.commit()
            await asyncio.sleep(_SAMPLE_S)

    def _why_not_start(self) -> str:
        """What one more group waits for. Empty: nothing."""
        rollout, trainer, buffer = self._p.config.rollout, self._p.config.trainer, self._buffer
        waiting = buffer.running_groups + buffer.buffered_groups
        batches_left = -(-(trainer.steps - self._clock.version) // trainer.steps_on_a_batch) - self._clock.training
        if waiting >= batches_left * trainer.groups_per_step:
            return "nothing: the groups for the last step have started"
        if not self._p.fleet.serving:
            return "an engine that serves"
        if not buffer.may_start():
            return "the staleness bound"
        if buffer.running_trajectories + rollout.group_size > rollout.max_in_flight:
            return "a free place in flight (rollout.max_in_flight)"
        return ""

    def _arrive(self, trajectory: Trajectory) -> None:
        arrival = self._buffer.arrive(trajectory, time.time())
        self._p.recorder.trajectory(trajectory, arrival.ended)
        self._record(arrival.facts)
        self._wake()

    async def _publish(self, sample: Sequence[Row]) -> None:
        """Begin to deliver the trainer's version; the trainer may go on once it is written, or the run is to end."""
        with suppress(RunStoppedError):
            async with self._p.stop.cancels():
                await self._p.delivery.start(sample, self._delivered, self._wake)

    def _delivered(self, version: PolicyVersion) -> None:
        """Engines serve `version`: room for new groups opens with it."""
        self._serving = version
        self._clock.publish(version.number)
        self._wake()

    async def _deliver_now(self) -> None:
        """Wait until the trainer's version serves, or the run is asked to end."""
        await self._delivery_ended()
        while not self._p.stop.asked and (self._serving is None or self._serving.number < self._clock.version):
            await self._publish(())
            await self._delivery_ended()

    async def _delivery_ended(self) -> None:
        """Wait for the version on its way, which may wait for engines to come back; or until the run is to end."""
        with suppress(RunStoppedError):
            async with self._p.stop.cancels():
                await self._p.delivery.finish()

    def _evaluation_due(self) -> bool:
        """True before the first step, then every so many; after a resume too, where one was undone or given up."""
        config = self._p.config.evaluation
        if config is None or self._evaluated is None:
            return config is not None
        return config.every_steps is not None and self._clock.version - self._evaluated >= config.every_steps

    async def _evaluate(self) -> None:
        """Evaluate what serves, unless that was done. No version is published meanwhile; rollouts go on."""
        await self._delivery_ended()
        serving = self._serving
        if self._p.evaluator is None or serving is None or self._p.stop.asked or serving == self._last_evaluated:
            return
        evaluated = await self._p.evaluator.evaluate(serving)
        if evaluated is None:
            return
        self._p.recorder.record(evaluated)
        self._p.recorder.commit()
        self._last_evaluated = serving
        self._evaluated = self._clock.version

    async def _checkpoint(self) -> None:
        """Save where the loop stood after the last batch, if the weights are still those."""
        state = self._settled
        if state.step != self._p.learner.version:
            return
        began = time.monotonic()
        self._p.recorder.commit()  # a checkpoint never points beyond the durable history
        path = await self._p.learner.save(lambda save: self._p.checkpoints.save(state, save))
        self._p.recorder.record(CheckpointSaved(step=state.step, path=path.name, seconds=time.monotonic() - began))
        self._p.recorder.commit()
        self._saved = state.step

    def _loop_state(self) -> LoopState:
        return LoopState(ledger_seq=self._p.recorder.last_seq, buffer=self._buffer.snapshot())

    def _record(self, facts: Sequence[Fact]) -> None:
        self._p.recorder.record(*facts)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _step_taken(outcome: StepOutcome, batch: TrainBatch, digest: str, waited_s: float) -> StepTaken:
    rewards = [reward for group in batch.groups for reward in group.rewards.values()]
    return StepTaken(
        number=outcome.number,
        stepped=outcome.stepped,
        why_not=outcome.why_not,
        metrics=outcome.metrics,
        mismatch=outcome.mismatch,
        slices=outcome.slices,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        weights_digest=digest,
        waited_s=waited_s,
        routes=outcome.routes,
        reference=outcome.reference,
        distillation=outcome.distillation,
    )
