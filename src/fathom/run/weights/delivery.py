"""From the trainer's weights to a version that serves, and the gap between both stacks at that version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from fathom.config.run import RunConfig
from fathom.core.errors import AlignmentError, DeliveryError, EngineError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import DigestKind, ScoreRequest
from fathom.core.records.row import Row
from fathom.core.records.step import Mismatch
from fathom.ledger.events import PublicationCancelled, Published
from fathom.run.history.recorder import Recorder
from fathom.run.learner import Learner
from fathom.run.weights.adapters import Outgoing
from fathom.run.weights.fleet import Fleet
from fathom.sync.probe import TOLERANCES, Probe
from fathom.sync.publication import Publication
from fathom.trainer.objective.mismatch import measure_mismatch

_MAX_FAILURES = 3
"""So many publications in a row may fail before the run ends."""


@final
class Delivery:
    """Publishes versions, one at a time, while the trainer goes on.

    The trainer waits only until its weights are written; engines stage, verify and commit them while it computes the
    next step. A publication that fails is recorded; once enough engines are whole, the caller may publish a later
    version.
    """

    def __init__(
        self,
        config: RunConfig,
        incarnation: int,
        learner: Learner,
        fleet: Fleet,
        recorder: Recorder,
        *,
        vocab_size: int,
    ) -> None:
        """`vocab_size`: ids that texts for the probe may be made of."""
        self._config = config
        self._incarnation = incarnation
        self._learner = learner
        self._fleet = fleet
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._running: asyncio.Task[None] | None = None
        self._failures = 0

    @property
    def idle(self) -> bool:
        """True when no version is on its way."""
        return self._running is None or self._running.done()

    async def start(
        self, rows: Sequence[Row], delivered: Callable[[PolicyVersion], None], ended: Callable[[], None]
    ) -> None:
        """Begin to publish the trainer's version, after the one before has ended. Returns when it may step again.

        Args:
            rows: recorded rows; a sample of them is scored by both stacks at this version.
            delivered: called once engines serve it.
            ended: called when `idle` is true again, however it went.

        Raises:
            DeliveryError | PayloadError: too many publications in a row have failed.
            AlignmentError: in aligned mode, engine and trainer differ.
        """
        await self.finish()
        number = self._learner.version
        sample = list(rows[: self._config.sync.gap_rows])
        trained = await self._learner.logprobs(sample) if sample else []
        probe = await self._probe()
        written = asyncio.Event()
        self._running = asyncio.create_task(self._deliver(number, probe, sample, trained, written, delivered))
        self._running.add_done_callback(lambda _: ended())
        waiting = asyncio.create_task(written.wait())
        try:
            await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def finish(self) -> None:
        """Wait for the version on its way, if any; cancelling the wait lets it go on. Raises as `start`."""
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running.result()
            self._running = None

    async def close(self) -> None:
        """Give up the version on its way: engines are about to end. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _deliver(
        self,
        number: int,
        probe: Probe | None,
        sample: Sequence[Row],
        trained: Sequence[np.ndarray],
        written: asyncio.Event,
        delivered: Callable[[PolicyVersion], None],
    ) -> None:
        outgoing = await self._learner.outgoing()
        publication = await self._publish(number, outgoing, probe, written)
        if publication is None:
            return
        delivered(publication.version)
        gap = await self._gap(publication.version, sample, trained)
        self._recorder.record(
            Published(
                version=publication.version,
                parent=publication.parent,
                transport=self._config.sync.transport,
                size_bytes=publication.size_bytes,
                moved_bytes=publication.moved_bytes,
                write_s=publication.write_s,
                stage_s=publication.stage_s,
                verify_s=publication.verify_s,
                commit_s=publication.commit_s,
                pause_s=publication.pause_s,
                committed=publication.committed,
                fenced=tuple(publication.fenced),
                gap=gap,
                cast_digest=publication.cast_digest,
                adapter=outgoing.adapter,
                merging=outgoing.merging,
            )
        )

    async def _probe(self) -> Probe | None:
        """What engines must answer at the trainer's version. None: all of them digest what they compute with."""
        able = [engine.capabilities for engine in self._fleet.engines]
        if all(each.digest is DigestKind.MEMORY for each in able):
            return None
        dtype = self._config.trainer.dtype
        return await Probe.prepare(
            self._learner.text_logprobs,
            vocab_size=self._vocab_size,
            longest=min(each.max_context_tokens for each in able),
            tolerance=self._config.sync.probe_tolerance or TOLERANCES[dtype],
        )

    async def _publish(
        self, number: int, outgoing: Outgoing, probe: Probe | None, written: asyncio.Event
    ) -> Publication | None:
        """One attempt. None: it failed, and enough engines are whole for another one."""
        try:
            publication = await self._fleet.publisher.publish(
                outgoing.tensors,
                number,
                self._incarnation,
                self._config.rollout.in_flight,
                written,
                probe,
                outgoing.adapter,
                outgoing.entries,
            )
        except (DeliveryError, PayloadError) as error:
            version = PolicyVersion(incarnation=self._incarnation, number=number, digest="")
            self._recorder.record(PublicationCancelled(version=version, reason=str(error)))
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                raise
            await self._fleet.recovered()
            return None
        self._failures = 0
        return publication

    async def _gap(
        self, version: PolicyVersion, sample: Sequence[Row], trained: Sequence[np.ndarray]
    ) -> Mismatch | None:
        """Engine against trainer on the same tokens at the same version: mismatch without any staleness."""
        if not sample:
            return None
        try:
            scored = await asyncio.gather(*(self._fleet.score(_score_request(version, row)) for row in sample))
        except EngineError as error:
            self._recorder.fault("same-version gap", error)
            return None
        if any(result.version != version for result in scored):
            return None
        log_ratio = np.concatenate(trained) - np.concatenate([result.logprobs for result in scored])
        if self._config.model.aligned and log_ratio.any():
            raise AlignmentError(
                f"at version {version.name} engine and trainer differ by up to {np.abs(log_ratio).max():.1e} in the "
                "log-probabilities of the same tokens; set model.aligned = false, or use equal libraries for both"
            )
        nothing = np.zeros(len(log_ratio), dtype=bool)
        return measure_mismatch(log_ratio, nothing, nothing)


def _score_request(version: PolicyVersion, row: Row) -> ScoreRequest:
    return ScoreRequest(
        request_id=f"gap/{version.name}/{row.trajectory}/{row.branch}",
        token_ids=row.token_ids,
        positions=row.positions,
        temperature=row.temperature,
        kept=row.kept,
        bias=row.bias,
    )
