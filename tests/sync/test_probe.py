import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fathom.config.sync import SyncConfig
from fathom.core.errors import DeliveryError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import CommitReport, DigestKind, ScoreRequest, ScoreResult, StageReport, VerifyReport
from fathom.core.records.sampling import InFlightMode
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.sync.probe import Probe
from fathom.sync.publisher import Publisher
from fathom.sync.transports.disk import DiskTransport

VOCAB = 50


def answers(number: int, text: np.ndarray) -> np.ndarray:
    """What a policy whose log-probabilities depend on version and token says of all tokens but the first."""
    return -np.abs(np.sin(text[1:] + 0.5 * number)).astype(np.float32)


class ReceivedOnly:
    """Digests what it received; computes with it, or, being `stale`, goes on as before."""

    def __init__(self, *, stale: bool = False, offset: float = 0.0) -> None:
        self.id = EngineId("e")
        self.capabilities = MemoryReceiver(self.id, {}).capabilities
        self.asked: list[tuple[int, ...]] = []
        self._stale = stale
        self._offset = offset
        self._staged: PolicyVersion | None = None
        self._version: PolicyVersion | None = None

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        self._staged = manifest.version
        return StageReport(size_bytes=manifest.size_bytes, moved_bytes=manifest.size_bytes, receive_s=0.0)

    async def verify(self) -> VerifyReport:
        assert self._staged is not None
        return VerifyReport(digest=self._staged.digest, kind=DigestKind.RECEIVED, verify_s=0.0)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        self._version = version
        return CommitReport(version=version, pause_s=0.0, running=0)

    async def rollback(self) -> None:
        self._staged = None

    async def score(self, request: ScoreRequest) -> ScoreResult:
        assert self._version is not None
        self.asked.append(tuple(request.token_ids.tolist()))
        number = 0 if self._stale else self._version.number
        return ScoreResult(logprobs=answers(number, request.token_ids) + self._offset, version=self._version)


async def publish(publisher: Publisher, number: int, probe: bool = True) -> None:
    async def score(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [answers(number, text) for text in texts]

    prepared = await Probe.prepare(score, vocab_size=VOCAB, longest=64, tolerance=0.01) if probe else None
    weights = {"w": torch.full((2,), float(number))}
    await publisher.publish(weights, number, 1, InFlightMode.CONTINUE, probe=prepared)


def run(engine: ReceivedOnly, folder: Path, *numbers: int, probe: bool = True) -> Publisher:
    async def publish_all() -> Publisher:
        publisher = Publisher([engine], DiskTransport(folder), SyncConfig())
        try:
            for number in numbers:
                await publish(publisher, number, probe)
        except DeliveryError:
            pass
        await publisher.close()
        return publisher

    return asyncio.run(publish_all())


def test_an_engine_that_answers_as_the_trainer_serves(tmp_path: Path) -> None:
    engine = ReceivedOnly(offset=0.005)
    publisher = run(engine, tmp_path, 0, 1)
    assert publisher.serving == ("e",)
    assert len(engine.asked) == len(set(engine.asked)) == 8, "every probe has a fresh nonce"


def test_an_engine_that_keeps_computing_with_old_weights_is_fenced(tmp_path: Path) -> None:
    publisher = run(ReceivedOnly(stale=True), tmp_path, 0, 1)
    assert publisher.serving == ()
    assert "behavioural probe failed at v1@1" in publisher.fenced[EngineId("e")]


@pytest.mark.parametrize("offset", [0.02, np.nan])
def test_an_engine_beyond_the_tolerance_is_fenced(offset: float, tmp_path: Path) -> None:
    publisher = run(ReceivedOnly(offset=offset), tmp_path, 0)
    assert "sync.probe_tolerance" in publisher.fenced[EngineId("e")]


def test_without_a_probe_nothing_proves_what_it_holds(tmp_path: Path) -> None:
    publisher = run(ReceivedOnly(), tmp_path, 0, probe=False)
    assert "without a probe" in publisher.fenced[EngineId("e")]


def test_a_restored_engine_is_probed_again(tmp_path: Path) -> None:
    async def restore() -> None:
        publisher = Publisher([ReceivedOnly()], DiskTransport(tmp_path), SyncConfig())
        await publish(publisher, 0)
        await publish(publisher, 1)
        with pytest.raises(Exception, match="behavioural probe failed"):
            await publisher.restore(ReceivedOnly(stale=True))
        assert publisher.serving == ()
        await publisher.restore(ReceivedOnly())
        assert publisher.serving == ("e",)
        await publisher.close()

    asyncio.run(restore())
