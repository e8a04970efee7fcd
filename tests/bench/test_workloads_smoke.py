"""Every workload at its smallest: it runs, measures what it says and compares like with like. Times are not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fathom.bench.options import EngineOptions
from fathom.bench.record import BenchRecord, values
from fathom.bench.rig.stand import tiny_model
from fathom.bench.workloads import run_workload
from fathom.bench.workloads.probe import SETTINGS

torch.set_num_threads(1)


def run(name: str, **options: object) -> BenchRecord:
    return run_workload(name, options, lambda _: None)


def test_probe_counts_tokens_of_every_setting_and_holds_the_bound() -> None:
    record = run("probe", tokens=100, requests=8, max_new_tokens=16)
    for setting in SETTINGS:
        assert values(record.samples, setting, "tokens")[0] >= 100
        assert values(record.samples, setting, "max |log r|")[0] <= 1e-5
    assert not record.failed
    assert all(target.required for target in record.targets)


def test_probe_allows_nothing_but_zero_in_aligned_mode() -> None:
    record = run("probe", tokens=60, requests=8, max_new_tokens=16, aligned=True, dtype="bfloat16")
    assert [(target.measured, target.limit, target.required) for target in record.targets] == [(0.0, 0.0, True)]


def test_engine_measures_every_side_at_every_batch() -> None:
    record = run("engine", batches=[1, 3], new_tokens=9, prompt_tokens=4, threads=1, repeats=1, dtype="float32")
    for side in ("Fathom", "Fathom, aligned", "generate"):
        for batch in ("1 at once", "3 at once"):
            assert values(record.samples, side, batch)[0] > 0
    assert {target.required for target in record.targets} == {False}


def test_engine_fits_the_tiny_model_as_it_is_called_without_options(tmp_path: Path) -> None:
    config = json.loads((tiny_model(tmp_path / "model") / "config.json").read_text())
    options = EngineOptions()
    assert options.prompt_tokens + options.new_tokens <= config["max_position_embeddings"]


def test_ledger_writes_each_length(tmp_path: Path) -> None:
    record = run("ledger", tokens=2000, lengths=[32, 100], repeats=2, folder=str(tmp_path))
    for variant in ("32 tokens", "100 tokens"):
        assert len(values(record.samples, variant, "ingest")) == 2
    assert not list(tmp_path.iterdir())


def test_session_measures_each_history_with_each_number_of_sessions() -> None:
    record = run("session", turns=[1, 3], sessions=[1, 2], new_tokens=4, window=1, repeats=1)
    for variant in ("1 sessions, 1 turns", "2 sessions, 3 turns"):
        assert values(record.samples, variant, "CPU per turn")[0] > 0
        assert values(record.samples, variant, "direct: wall")[0] > 0
    assert values(record.samples, "2 sessions, 3 turns", "tokens per session")[0] > 4 * 8
    assert {target.required for target in record.targets} == {False}


@pytest.mark.slow
def test_lora_publishes_both_ways() -> None:
    record = run("lora", rank=2, repeats=2)
    share = values(record.samples, "adapter / whole model", "bytes, ratio")
    assert len(share) == len(values(record.samples, "adapter / whole model", "publication, ratio")) == 2
    assert 0 < share[0] < 0.1
    assert {target.required for target in record.targets} == {False}


def test_train_splits_each_step() -> None:
    record = run("train", parts=["step"], max_new_tokens=4, steps=2, warmup=0, repeats=1, threads=1)
    parts = [values(record.samples, "Fathom", part) for part in ("generate and grade", "train", "publish")]
    assert values(record.samples, "Fathom", "step") == pytest.approx([sum(step) for step in zip(*parts, strict=True)])
    assert len(parts[0]) == 2
    assert not record.targets, "without TRL there is nothing to compare with"


def test_train_times_given_rows_in_each_way_and_fills_micro_batches() -> None:
    sizes = {"group_size": 2, "prompt_tokens": 40, "median_tokens": 4, "longest_tokens": 8}
    record = run("train", parts=["rows"], steps=2, warmup=0, repeats=1, threads=1, **sizes)
    for variant in ("Fathom, rows alone", "Fathom, packed", "Fathom"):
        assert len(values(record.samples, variant, "training step")) == 2
    filled = values(record.samples, "packing: Fathom", "filled")
    assert len(filled) == len(values(record.samples, "packing: first fit, as rows come", "filled")) > 1
    assert [(target.required, target.met) for target in record.targets] == [(True, True)]


@pytest.mark.slow
def test_pipeline_trains_the_same_in_every_variant() -> None:
    record = run("pipeline", steps=2, groups=2, group_size=2, slots=4, max_new_tokens=8, repeats=1)
    lengths = set()
    for variant in ("S=0", "S=2 wait", "S=0, no latency", "S=2 wait, no latency"):
        assert values(record.samples, variant, "trained: trajectories") == [8]
        lengths.add(values(record.samples, variant, "trained: mean length")[0])
    assert len(lengths) == 1
    assert len(values(record.samples, "S=0 / S=2 wait", "full step, ratio")) == 1
