"""Records of benchmarks: what they hold, how they are read back, and how numbers are compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fathom.bench.options import LedgerOptions
from fathom.bench.record import Measured, Sample, Target, alternating, file_record, ratios, read_record, take, values
from fathom.bench.workloads import WORKLOADS, run_workload
from fathom.core.errors import ConfigError


def sample(variant: str, repeat: int, value: float) -> Sample:
    return Sample(variant=variant, measure="wall", unit="s", repeat=repeat, value=value)


def target(measured: float, *, at_most: bool = True, required: bool = False) -> Target:
    return Target(claim="it is small", measured=measured, limit=1.0, at_most=at_most, required=required)


def test_a_record_is_read_back_as_it_was_filed(tmp_path: Path) -> None:
    options = LedgerOptions(tokens=7)
    measured = Measured(samples=[sample("a", 0, 1.5)], targets=[target(0.5)], notes=["a note"])
    record = take("ledger", options, lambda: measured)
    path = file_record(record, tmp_path / "new")
    assert path == tmp_path / "new" / f"{record.id}.json"
    assert read_record(path).samples == record.samples == (sample("a", 0, 1.5),)
    written = json.loads(path.read_text())
    assert written["options"]["tokens"] == 7
    assert written["machine"]["libraries"]["torch"]
    assert written["notes"] == ["a note"]


def test_two_records_have_two_names() -> None:
    first, second = (take("ledger", LedgerOptions(), lambda: Measured(samples=[])) for _ in range(2))
    assert first.id != second.id


@pytest.mark.parametrize(
    ("measured", "at_most", "met"),
    [(1.0, True, True), (1.1, True, False), (1.0, False, True), (0.9, False, False), (math.nan, True, False)],
)
def test_a_target_is_met_at_its_bound_and_never_by_nan(measured: float, at_most: bool, met: bool) -> None:
    assert target(measured, at_most=at_most).met is met


def test_only_a_missed_required_target_fails() -> None:
    def failed(*targets: Target) -> bool:
        return take("ledger", LedgerOptions(), lambda: Measured(samples=[], targets=targets)).failed

    assert not failed(target(2.0))
    assert failed(target(0.5), target(2.0, required=True))
    assert not failed(target(0.5, required=True))


def test_ratios_divide_within_a_repeat() -> None:
    samples = [sample("a", 0, 4.0), sample("b", 0, 2.0), sample("b", 1, 3.0), sample("a", 1, 9.0)]
    assert values(ratios(samples, "wall", "a", "b"), "a / b", "wall, ratio") == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([*samples, sample("a", 2, 1.0)], "wall", "a", "b")


def test_order_alternates() -> None:
    assert list(alternating(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_wrong_option_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"did you mean probe\.tokens"):
        run_workload("probe", {"token": 3}, lambda _: None)


def test_every_option_has_a_sentence() -> None:
    for workload in WORKLOADS.values():
        assert all(field.description for field in workload.options.model_fields.values())
