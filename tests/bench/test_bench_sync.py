"""`fathom bench sync` at its smallest: every part runs, measures what it says, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fathom.bench.record import BenchRecord, values
from fathom.bench.rig.network import slow_network, why_not
from fathom.bench.workloads import run_workload

torch.set_num_threads(1)
PHASES = ("digest", "write", "transfer", "verify", "commit", "paused")


def run(**options: object) -> BenchRecord:
    return run_workload("sync", {"repeats": 1, **options}, lambda _: None)


def test_transports_reach_receivers_of_their_own_beside_the_bare_library(tmp_path: Path) -> None:
    transports = ["shared", "disk", "broadcast"]
    record = run(parts=["fleet"], sizes_mb=[1], receivers=[1], transports=transports, repeats=2, folder=str(tmp_path))
    assert not record.failed, record.notes
    for transport in transports:
        variant = f"{transport}, 1 MB to 1"
        assert all(len(values(record.samples, variant, phase)) == 2 for phase in PHASES)
        assert values(record.samples, variant, "moved to each")[0] == pytest.approx(1, rel=0.2)
    ours, raw = (values(record.samples, f"{name}, 1 MB to 1", "transfer") for name in ("broadcast", "raw Gloo"))
    shown = values(record.samples, "broadcast, 1 MB to 1 / raw Gloo, 1 MB to 1", "transfer, ratio")
    assert shown == pytest.approx([above / below for above, below in zip(ours, raw, strict=True)])
    assert not list(tmp_path.iterdir())


def test_a_real_engine_is_paused_for_a_part_of_it(tmp_path: Path) -> None:
    record = run(parts=["pause"], requests=2, transports=["shared"], folder=str(tmp_path))
    for variant in ("shared, idle", "shared, generating"):
        (delivered,) = values(record.samples, variant, "stage to commit")
        parts = [values(record.samples, variant, part)[0] for part in ("stage", "verify", "commit")]
        assert delivered == pytest.approx(sum(parts))
    assert not list(tmp_path.iterdir())


def test_what_fails_is_named_and_fails_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "wrong").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "wrong"))
    record = run(parts=["fleet"], sizes_mb=[1], receivers=[1], transports=["shared"], folder=str(tmp_path))
    assert record.failed
    assert [note for note in record.notes if note.startswith("FAILED: shared, 1 MB to 1: EngineDeadError")]


def test_what_does_not_fit_into_memory_is_left_out_with_a_word(tmp_path: Path) -> None:
    record = run(parts=["fleet"], sizes_mb=[10**9], receivers=[1, 2], transports=["shared"], folder=str(tmp_path))
    assert not record.failed
    assert not record.samples
    assert len([note for note in record.notes if "MB of memory are missing" in note]) == 2


NO_NETWORKS = why_not()


@pytest.mark.slow
@pytest.mark.skipif(NO_NETWORKS is not None, reason=str(NO_NETWORKS))
def test_links_are_as_slow_as_asked_and_gone_afterwards(tmp_path: Path) -> None:
    record = run(
        parts=["network"], network_mbit_per_s=[100], network_size_mb=1, transports=["broadcast"], folder=str(tmp_path)
    )
    assert not record.failed, record.notes
    least_s = 0.8e6 * 8 / 100e6
    assert values(record.samples, "raw Gloo, 1 MB to 1 over 100 Mbit/s", "transfer")[0] > least_s / 2
    with slow_network(1, 100) as (machine,):
        assert Path(f"/run/netns/{machine.namespace}").exists()
    assert not list(Path("/run/netns").glob("fathom-bench-*"))


@pytest.mark.slow
def test_real_steps_are_published_as_files_and_as_deltas(tmp_path: Path) -> None:
    record = run(
        parts=["delta"],
        warm_steps=1,
        counted_steps=2,
        learning_rates=[1e-6],
        storage_mb_per_s=[2],
        folder=str(tmp_path),
    )
    shares = values(record.samples, "lr 1e-06", "share moved")
    assert len(shares) == 2
    assert all(0 < share < 0.5 for share in shares)
    full, delta = (values(record.samples, f"{side}, lr 1e-06, 2 MB/s", "end to end") for side in ("full file", "delta"))
    moved = values(record.samples, "full file, lr 1e-06, 2 MB/s", "moved to each")
    assert all(seconds > 2 * size / 2 for seconds, size in zip(full, moved, strict=True)), "written once and read once"
    assert len(delta) == 2
    assert [target.required for target in record.targets if "share" in target.claim] == [False]
    assert not list(tmp_path.iterdir())
