"""Packed rows score as the model does by itself; a shifted token or a forgotten temperature shows."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_rows import make_row, save_model
from transformers import AutoModelForCausalLM

from fathom.config.trainer import TrainerConfig
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend

Score = Callable[[PackedRows], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def score(folder) -> Score:
    return TorchBackend(folder, TrainerConfig(steps=1, groups_per_step=1)).logprobs


@pytest.fixture(scope="module")
def check(folder) -> Callable[[Score], None]:
    rng = np.random.default_rng(0)
    rows = [
        replace(row, temperature=np.linspace(0.5, 2.0, len(row.positions)).astype(np.float32))
        for row in (make_row(rng, "a", prompt=3, sampled=4), make_row(rng, "b", prompt=5, sampled=6))
    ]
    model = AutoModelForCausalLM.from_pretrained(folder)

    def expected(row) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.from_numpy(row.token_ids.astype(np.int64)).unsqueeze(0)).logits[0]
        before = logits[torch.from_numpy(row.positions) - 1] / torch.from_numpy(row.temperature).unsqueeze(1)
        targets = torch.from_numpy(row.token_ids[row.positions].astype(np.int64))
        return before.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)

    def same(score: Score) -> None:
        made = score(PackedRows.of_rows(rows))
        torch.testing.assert_close(made, torch.cat([expected(row) for row in rows]), rtol=1e-4, atol=1e-4)

    return same


def test_the_backend_scores_as_the_model_does(check, score):
    check(score)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda rows: replace(rows, sources=np.maximum(rows.sources - 1, 0)),
        lambda rows: replace(rows, targets=np.roll(rows.targets, 1)),
        lambda rows: replace(rows, temperature=np.ones_like(rows.temperature)),
        lambda rows: replace(rows, lengths=(sum(rows.lengths),)),
        lambda rows: replace(rows, position_ids=np.arange(len(rows.input_ids), dtype=np.int64) * 2),
    ],
    ids=["shifted sources", "shifted targets", "no temperature", "attention across rows", "stretched positions"],
)
def test_a_fault_in_the_layout_is_noticed(check, score, mutate):
    with pytest.raises(AssertionError):
        check(lambda rows: score(mutate(rows)))
