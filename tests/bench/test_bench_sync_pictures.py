"""What is made of a sync record afterwards: the crossover, the pictures, the table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fathom.apps.cli.bench import sections
from fathom.apps.cli.main import app
from fathom.bench.options import SyncOptions
from fathom.bench.record import BenchRecord, Measured, Sample, file_record, take
from fathom.bench.workloads.sync.crossover import crossover_mb_per_s, measured_speeds, predicted_s, storage_variant
from fathom.bench.workloads.sync.picture import draw
from fathom.core.errors import ConfigError

LR = 3e-6
FULL_MB, DELTA_MB = 100.0, 10.0


def publications(side: str, mb_per_s: float, seconds: float, moved_mb: float) -> Iterator[Sample]:
    variant = storage_variant(side, LR, mb_per_s)
    yield Sample(variant=variant, measure="end to end", unit="s", repeat=0, value=seconds)
    yield Sample(variant=variant, measure="moved to each", unit="MB", repeat=0, value=moved_mb)


def storage(full_s: float, delta_s: float, *speeds: float) -> list[Sample]:
    samples: list[Sample] = []
    for speed in (0.0, *speeds):
        samples += publications("full file", speed, full_s + (2 * FULL_MB / speed if speed else 0), FULL_MB)
        samples += publications("delta", speed, delta_s + (2 * DELTA_MB / speed if speed else 0), DELTA_MB)
    return samples


def transfers(options: SyncOptions) -> list[Sample]:
    return [
        Sample(
            variant=f"{what}, {size} MB to {count}", measure="transfer", unit="s", repeat=0, value=size * count / 1e3
        )
        for what in ("shared", "broadcast", "raw Gloo")
        for size in options.sizes_mb
        for count in options.receivers
    ]


def record_of(samples: list[Sample]) -> BenchRecord:
    options = SyncOptions(learning_rates=(LR,), receivers=(1, 2))
    return take("sync", options, lambda: Measured(samples=samples))


def test_at_the_crossover_both_take_the_same_time() -> None:
    samples = storage(0.2, 0.5)
    crossover = crossover_mb_per_s(samples, LR)
    assert crossover == pytest.approx(2 * (FULL_MB - DELTA_MB) / 0.3)
    both = [predicted_s(samples, side, LR, crossover) for side in ("full file", "delta")]
    assert both[0] == pytest.approx(both[1])


def test_there_is_none_where_the_delta_is_always_faster() -> None:
    assert crossover_mb_per_s(storage(0.5, 0.5), LR) is None


def test_speeds_are_found_by_number() -> None:
    assert measured_speeds(storage(0.2, 0.5, 1200, 200, 90), LR) == [90, 200, 1200]


@pytest.mark.parametrize("deltas", [[], storage(0.2, 0.5, 200)])
def test_a_picture_is_drawn_of_what_there_is(tmp_path: Path, deltas: list[Sample]) -> None:
    pytest.importorskip("matplotlib")
    options = SyncOptions(receivers=(1, 2))
    draw(record_of(transfers(options) + deltas), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_without_any_of_it_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="measure parts fleet or delta"):
        draw(record_of([]), tmp_path / "picture.png")


def test_a_filed_record_is_shown_and_drawn_later(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = file_record(record_of(storage(0.2, 0.5, 200)), tmp_path)
    shown = CliRunner().invoke(
        app, ["bench", "sync", "--record", str(path), "--picture", str(tmp_path / "later.png")], catch_exceptions=False
    )
    assert shown.exit_code == 0
    assert "full file, lr 3e-06, 200 MB/s" in shown.output
    assert (tmp_path / "later.png").exists()


def test_many_numbers_are_a_row_for_each_variant() -> None:
    samples = [
        Sample(variant=f"variant {place}", measure=measure, unit="s", repeat=repeat, value=place + repeat)
        for place in range(40)
        for measure in ("transfer", "verify")
        for repeat in range(3)
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    for section in sections(record_of(samples)):
        console.print(section)
    lines = [line for line in console.export_text().splitlines() if line.startswith("variant 7 ")]
    assert [line.split() for line in lines] == [["variant", "7", "8", "s", "8", "s"]]
