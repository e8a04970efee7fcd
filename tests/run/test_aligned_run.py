"""Aligned mode in whole runs: what staleness does to a log-probability, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_runs import require_sound, small_config

from fathom import Run
from fathom.config.families import EngineKind
from fathom.core.errors import AlignmentError, ConfigError
from fathom.core.ports.engine import ScoreRequest, ScoreResult
from fathom.core.records.step import MismatchSlice
from fathom.ledger.events import Published, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.registry import LAUNCHERS

ALIGNED = "model.aligned=true"


def played(config) -> Path:
    outcome = Run(config).start()
    assert outcome.exit_code == 0
    require_sound(outcome.folder)
    return outcome.folder


def slices(run: Path) -> list[MismatchSlice]:
    with LedgerReader(run / "ledger") as reader:
        return [part for entry in reader.events(StepTaken) for part in entry.event.slices]


def test_without_staleness_the_mismatch_is_zero_on_every_step(tmp_path: Path) -> None:
    run = played(small_config(tmp_path, ALIGNED, "staleness.max_staleness=0"))
    found = slices(run)
    assert len(found) == 6
    assert {(part.age, part.kv_age) for part in found} == {(0, 0)}
    assert all(part.mismatch.abs_log_ratio_max == 0.0 for part in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_staleness_it_is_zero_where_there_is_none(tmp_path: Path, dtype: str) -> None:
    more = ("staleness.max_staleness=2", f"trainer.dtype={dtype}", "rollout.max_new_tokens=16", "trainer.steps=8")
    run = played(small_config(tmp_path, ALIGNED, *more))
    found = slices(run)
    assert all(part.mismatch.abs_log_ratio_max == 0.0 for part in found if part.age == part.kv_age == 0)
    assert any(part.mismatch.abs_log_ratio_max > 0.0 for part in found if part.age > 0)
    with LedgerReader(run / "ledger") as reader:
        gaps = [entry.event.gap for entry in reader.events(Published)]
    assert any(gap is not None for gap in gaps)
    assert all(gap.abs_log_ratio_max == 0.0 for gap in gaps if gap is not None)


class OneBitOff:
    """An engine that scores a little differently from the trainer, as one with another kernel would."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        result = await self._engine.score(request)
        return msgspec.structs.replace(result, logprobs=result.logprobs * (1 + 2e-7))


def test_a_difference_at_one_version_ends_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, ALIGNED)
    launch = LAUNCHERS[EngineKind.EMBEDDED](config.engine)

    async def off(spec: EmbeddedSpec) -> Any:
        return OneBitOff(await launch(spec))

    with pytest.raises(AlignmentError, match="engine and trainer differ"):
        Run(config).start(launcher=off)


def test_it_is_refused_where_publications_would_not_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gap_rows"):
        small_config(tmp_path, ALIGNED, "sync.gap_rows=0")
