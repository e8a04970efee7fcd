"""An adapter under training: what moves, what is kept, and which base it may be loaded over."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from random_rows import make_row, save_model

from fathom.config.families import Dtype, OptimizerKind
from fathom.config.lora import LoraConfig
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.core.errors import CheckpointError, ConfigError
from fathom.model.language_model import LanguageModel
from fathom.sync.adapters.adopt import AdapterStart
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend

DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """The same model with one weight moved by the least there is."""
    folder = save_model(tmp_path_factory.mktemp("another"), tied=True)
    model = LanguageModel.load(folder, torch.float32, "cpu")
    weight = model.weights()["model.norm.weight"].detach()
    weight[0] = torch.nextafter(weight[0], weight[0] + 1)
    model.save(folder)
    return folder


def start(folder=None, base="", **options):
    return AdapterStart(form=LoraConfig(**options).form("x"), seed=3, folder=folder, base=base)


def backend_of(folder, adapter, dtype=Dtype.FLOAT32, kind=OptimizerKind.ADAMW):
    optimizer = OptimizerConfig(lr=1e-2, kind=kind)
    config = TrainerConfig(steps=8, groups_per_step=1, dtype=dtype, optimizer=optimizer, threads=1)
    return TorchBackend(folder, config, adapter=adapter)


def rows_of(seed=0):
    rng = np.random.default_rng(seed)
    return PackedRows.of_rows([make_row(rng, f"t{i}", prompt=2 + i, sampled=3 + i) for i in range(3)])


def train(backend, steps):
    for step in range(backend.step, backend.step + steps):
        backend.accumulate(rows_of(step), lambda outputs: (-outputs.logprobs.mean(), None))
        backend.update()


def copy_of(backend):
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_begins_at_the_base_and_moves_the_adapter_alone(folder, dtype):
    plain, backend = backend_of(folder, None, dtype), backend_of(folder, start(rank=2), dtype)
    assert torch.equal(backend.logprobs(rows_of()), plain.logprobs(rows_of()))
    backend.keep_reference()
    before = copy_of(backend)
    train(backend, 2)
    assert all("lora_" in name for name in backend.masters)
    assert backend.masters.keys() == before.keys()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in backend.weights().items())
    assert not torch.equal(backend.logprobs(rows_of()), plain.logprobs(rows_of()))
    assert torch.equal(backend.reference_logprobs(rows_of()), plain.logprobs(rows_of()))
    base = {name for name, tensor in backend.whole()[0].items() if torch.equal(tensor, plain.weights()[name])}
    moved = {f"{name.rpartition('.')[0]}.weight" for name in before}
    assert base | moved == plain.weights().keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [OptimizerKind.ADAMW, OptimizerKind.MUON])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_to_the_bit(folder, dtype, kind, tmp_path):
    straight = backend_of(folder, start(), dtype, kind)
    train(straight, 2)
    straight.save(tmp_path / "c")
    train(straight, 2)
    resumed = backend_of(folder, start(), dtype, kind)
    resumed.load(tmp_path / "c")
    train(resumed, 2)
    assert same(copy_of(resumed), copy_of(straight))
    held = sum(file.stat().st_size for file in (tmp_path / "c" / "model").glob("*.safetensors"))
    assert held < 2 * sum(tensor.nbytes for tensor in straight.weights().values()) + 8192
    assert not list((tmp_path / "c").rglob("model.safetensors"))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"alpha": 3.0}, "alpha"), ({"rslora": True}, "rslora"), ({"target_modules": ("q_proj",)}, "targets")],
)
def test_a_checkpoint_of_another_adapter_is_refused(folder, options, says, tmp_path):
    backend = backend_of(folder, start())
    train(backend, 1)
    backend.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=says):
        backend_of(folder, start(**options)).load(tmp_path / "c")


def test_a_checkpoint_over_another_base_is_refused(folder, another, tmp_path):
    backend = backend_of(folder, start())
    train(backend, 1)
    backend.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="another base"):
        backend_of(another, start()).load(tmp_path / "c")


def test_a_saved_adapter_is_started_from(folder, tmp_path):
    backend = backend_of(folder, start())
    train(backend, 2)
    backend.save(tmp_path / "c")
    again = backend_of(folder, start(tmp_path / "c" / "model"))
    assert same(copy_of(again), copy_of(backend))
    assert torch.equal(again.logprobs(rows_of()), backend.logprobs(rows_of()))


def test_an_adapter_for_another_base_is_not_started_from(folder, another, tmp_path):
    backend_of(folder, start()).save(tmp_path / "c")
    model = tmp_path / "c" / "model"
    with pytest.raises(ConfigError, match="adapter for another base"):
        backend_of(another, start(model))
    with pytest.raises(ConfigError, match="another base"):
        backend_of(folder, start(model), Dtype.BFLOAT16)
    with pytest.raises(ConfigError, match="rank, alpha and rslora"):
        backend_of(folder, start(model, rank=4))
    (model / "fathom_adapter.json").unlink()
    with pytest.raises(ConfigError, match="says that it is for"):
        backend_of(folder, start(model, base="elsewhere"))
    assert backend_of(folder, start(model, base=str(folder))).step == 0


def test_what_merging_loses_is_told(folder):
    backend = backend_of(folder, start(), Dtype.BFLOAT16)
    train(backend, 1)
    whole, rounding = backend.whole()
    assert rounding is not None
    assert rounding.max_abs > 0
    assert rounding.updated > 0
    assert whole.keys() == backend_of(folder, None).weights().keys()
    assert backend_of(folder, None).whole()[1] is None


def test_what_is_written_says_the_convention_of_the_scale(folder, tmp_path):
    backend = backend_of(folder, start(rank=4, alpha=6.0, rslora=True))
    backend.save(tmp_path / "c")
    said = json.loads(Path(tmp_path / "c" / "model" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["use_rslora"]) == (4, 6.0, True)
