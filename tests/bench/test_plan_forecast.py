"""A record of the sync bench beside what the plan predicts from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.bench.forecast import forecast_of
from fathom.bench.options import LedgerOptions, SyncOptions
from fathom.bench.record import Measured, Sample, file_record, take
from fathom.bench.workloads.sync.names import DIGEST, TRANSFER, fleet_variant, link_name
from fathom.core.errors import ConfigError

OPTIONS = SyncOptions(sizes_mb=(10, 100), receivers=(1, 2), network_mbit_per_s=(80,), network_size_mb=10)


def sample(variant: str, measure: str, value: float, repeat: int = 0) -> Sample:
    return Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value)


def filed(tmp_path: Path, samples: list[Sample]) -> Path:
    return file_record(take("sync", OPTIONS, lambda: Measured(samples=samples)), tmp_path)


def test_every_phase_that_was_measured_is_predicted(tmp_path: Path) -> None:
    samples = [sample(fleet_variant("shared", 100, 1), TRANSFER, value, r) for r, value in enumerate((0.9, 1.0, 5.0))]
    samples += [
        sample(fleet_variant("shared", 10, 1), TRANSFER, 0.2),
        sample(fleet_variant("p2p by NIXL", 100, 2), DIGEST, 0.5),
        sample(fleet_variant("broadcast", 10, 1, link_name(80)), TRANSFER, 2.0),
        sample("one thread, 10 MB", "copy", 3.0),
    ]
    found = {
        (row.taken.transport, row.taken.phase, row.taken.size_bytes): row
        for row in forecast_of(filed(tmp_path, samples))
    }
    assert len(found) == 4
    assert found["shared", TRANSFER, 100e6].calibrated
    assert found["shared", TRANSFER, 10e6].predicted_s == pytest.approx(0.1)  # a tenth of the median
    assert found["shared", TRANSFER, 10e6].error == pytest.approx(-0.5)
    assert found["broadcast", TRANSFER, 10e6].predicted_s == pytest.approx(1.0)  # 10 MB at 80 Mbit/s


def test_records_of_something_else_are_refused_with_the_fix(tmp_path: Path) -> None:
    other = file_record(take("ledger", LedgerOptions(), lambda: Measured(samples=[])), tmp_path)
    with pytest.raises(ConfigError, match="give one of 'fathom bench sync'"):
        forecast_of(other)
    with pytest.raises(ConfigError, match="measure them with"):
        forecast_of(filed(tmp_path, []))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no record of a bench"):
        forecast_of(tmp_path / "x.json")
