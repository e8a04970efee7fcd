"""From the trainer's weights to a version that serves, and the gap between both stacks at that version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.config.run import RunConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import ScoreRequest
from fathom.core.records.row import Row
from fathom.core.records.step import Mismatch
from fathom.ledger.events import PublicationCancelled, Published
from fathom.run.history.recorder import Recorder
from fathom.run.learner import Learner
from fathom.run.weights.fleet import Fleet
from fathom.sync.publication import Publication
from fathom.trainer.objective.mismatch import measure_mismatch

_ATTEMPTS = 3


@final
class Delivery:
    """Publishes versions. One that cannot be delivered after a few attempts ends the run."""

    def __init__(self, config: RunConfig, incarnation: int, learner: Learner, fleet: Fleet, recorder: Recorder) -> None:
        self._config = config
        self._incarnation = incarnation
        self._learner = learner
        self._fleet = fleet
        self._recorder = recorder

    async def deliver(self, rows: Sequence[Row]) -> PolicyVersion:
        """Make the trainer's current version serve; returns it. `rows` are a sample for the same-version gap.

        Raises:
            DeliveryError: engines could not be brought to take it.
            PayloadError: the version is wrong in itself, repeatedly.
        """
        publication = await self._publish()
        gap = await self._gap(publication.version, rows)
        self._recorder.record(
            Published(
                version=publication.version,
                parent=publication.parent,
                transport=self._config.sync.transport,
                size_bytes=publication.size_bytes,
                write_s=publication.write_s,
                stage_s=publication.stage_s,
                verify_s=publication.verify_s,
                commit_s=publication.commit_s,
                pause_s=publication.pause_s,
                committed=publication.committed,
                fenced=tuple(publication.fenced),
                gap=gap,
            )
        )
        return publication.version

    async def _publish(self) -> Publication:
        number = self._learner.version
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._fleet.publisher.publish(
                    self._learner.weights(), number, self._incarnation, self._config.rollout.in_flight
                )
            except DeliveryError as error:
                self._recorder.fault("publication", error)
                if attempt == _ATTEMPTS:
                    raise
                await self._fleet.recover()
            except PayloadError as error:
                version = PolicyVersion(incarnation=self._incarnation, number=number, digest="")
                self._recorder.record(PublicationCancelled(version=version, reason=str(error)))
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _gap(self, version: PolicyVersion, rows: Sequence[Row]) -> Mismatch | None:
        """Engine against trainer on the same tokens at the same version: mismatch without any staleness."""
        sample = list(rows[: self._config.sync.gap_rows])
        if not sample:
            return None
        try:
            scored = [await self._fleet.score(_score_request(version, row)) for row in sample]
        except EngineError as error:
            self._recorder.fault("same-version gap", error)
            return None
        if any(result.version != version for result in scored):
            return None
        trained = np.concatenate(await self._learner.logprobs(sample))
        log_ratio = trained - np.concatenate([result.logprobs for result in scored])
        nothing = np.zeros(len(log_ratio), dtype=bool)
        return measure_mismatch(log_ratio, nothing, nothing)


def _score_request(version: PolicyVersion, row: Row) -> ScoreRequest:
    return ScoreRequest(
        request_id=f"gap/{version.name}/{row.trajectory}/{row.branch}",
        token_ids=row.token_ids,
        positions=row.positions,
        temperature=row.temperature,
        kept=row.kept,
    )
