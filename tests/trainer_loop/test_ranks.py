"""Two trainer processes give the gradient of one, for every objective."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from random_rows import make_row, save_model

from fathom.config.families import ObjectiveKind
from fathom.config.objectives import OBJECTIVES
from fathom.config.objectives.declaration import RecordField
from fathom.core.errors import FathomError
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.ranks.ranks import Ranks

SCRIPT = Path(__file__).with_name("ranked_process.py")


def _start(rank: int, size: int, meeting: Path, model: Path, out: Path) -> subprocess.Popen[str]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(rank), str(size), str(meeting), str(model), str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What one process alone finds, and what each of two finds."""
    folder = tmp_path_factory.mktemp("ranks")
    model = save_model(folder / "model")
    pair = [_start(rank, 2, folder / "meeting", model, folder / "two") for rank in range(2)]
    alone = _start(0, 1, folder / "nowhere", model, folder / "one")
    for process in (*pair, alone):
        _finish(process)
    return folder, np.load(folder / "one" / "rank0.npz"), [np.load(folder / "two" / f"rank{r}.npz") for r in range(2)]


@pytest.mark.parametrize("kind", ObjectiveKind)
def test_two_processes_give_the_gradient_of_one(made, kind):
    _, alone, pair = made
    for both in pair:
        np.testing.assert_allclose(both[f"objective/{kind}"], alone[f"objective/{kind}"], rtol=1e-12, atol=1e-12)
        expected = alone[f"gradient/{kind}"]
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(both[f"gradient/{kind}"], expected, rtol=1e-6, atol=1e-6 * scale)
        np.testing.assert_allclose(both[f"loss/{kind}"], alone[f"loss/{kind}"], atol=1e-6)
        np.testing.assert_array_equal(both[f"tokens/{kind}"], alone[f"tokens/{kind}"])
        np.testing.assert_allclose(both[f"logprobs/{kind}"], alone[f"logprobs/{kind}"], atol=1e-5)
    assert float(np.abs(alone[f"gradient/{kind}"]).max()) > 1e-4
    # and they stay one model: what they do next does not depend on which of them one asks
    for name in ("gradient", "norm", "logprobs"):
        np.testing.assert_array_equal(pair[0][f"{name}/{kind}"], pair[1][f"{name}/{kind}"])


def test_a_critic_is_trained_by_both(made):
    _, alone, pair = made
    kinds = [kind for kind in ObjectiveKind if f"critic_gradient/{kind}" in alone]
    assert ObjectiveKind.PPO in kinds
    for kind in kinds:
        for both in pair:
            expected = alone[f"critic_gradient/{kind}"]
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(both[f"critic_gradient/{kind}"], expected, rtol=1e-6, atol=1e-6 * scale)
            np.testing.assert_allclose(both[f"value_loss/{kind}"], alone[f"value_loss/{kind}"], atol=1e-6)


def test_one_of_them_writes_the_checkpoint(made):
    folder, _, _ = made
    for kind in ObjectiveKind:
        saved = folder / "two" / f"saved-{kind}"
        assert (saved / "trainer.json").is_file()
        assert (saved / "critic").is_dir() == (RecordField.VALUES in OBJECTIVES[kind].needs)


def test_rows_are_shared_out_evenly_and_each_goes_to_one():
    lengths = [9, 1, 4, 4, 2, 7]
    shares = [Ranks(rank, 3, 1.0).share(lengths) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == list(range(6))
    loads = [sum(lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= 3
    assert Ranks(2, 3, 1.0).share([5, 5]) == []


def test_some_of_packed_rows_are_those_rows_packed():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, f"t{i}", prompt=2 + i, sampled=1 + i, kept=i == 1) for i in range(4)]
    whole = PackedRows.of_rows(rows)
    some, expected = whole.take([3, 1]), PackedRows.of_rows([rows[3], rows[1]])
    for name in ("input_ids", "position_ids", "sources", "targets", "temperature"):
        np.testing.assert_array_equal(getattr(some, name), getattr(expected, name))
    assert (some.lengths, some.loss_lengths) == (expected.lengths, expected.loss_lengths)
    np.testing.assert_array_equal(some.kept.ids, expected.kept.ids)
    assert torch.equal(torch.from_numpy(whole.places([3, 1])), torch.tensor([6, 7, 8, 9, 1, 2]))


def test_nobody_waits_for_ever(tmp_path):
    with pytest.raises(FathomError, match="met nobody"):
        Ranks.join(0, 2, tmp_path / "meeting", timeout_s=0.5)
