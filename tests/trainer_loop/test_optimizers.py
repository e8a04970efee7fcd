"""Every optimizer and schedule: what moves, what is kept, and that a resume goes on bit for bit."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from random_rows import make_row, save_model
from torch import nn

from fathom.config.families import Dtype, OptimizerKind, Schedule
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.core.errors import CheckpointError
from fathom.trainer.backends.masters import zero_gradients
from fathom.trainer.backends.optimizers.kinds import OPTIMIZERS, open_optimizer
from fathom.trainer.backends.optimizers.muon import Muon
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend

NO_8BIT = importlib.util.find_spec("bitsandbytes") is None
KINDS = [
    OptimizerKind.ADAMW,
    OptimizerKind.MUON,
    pytest.param(
        OptimizerKind.ADAM8BIT,
        marks=pytest.mark.skipif(NO_8BIT, reason="bitsandbytes is not installed: pip install 'fathom-rl[adam8bit]'"),
    ),
]


def _config(kind: OptimizerKind, schedule: Schedule = Schedule.COSINE) -> OptimizerConfig:
    floor = {} if schedule is Schedule.CONSTANT else {"min_lr_ratio": 0.1}
    return OptimizerConfig(kind=kind, lr=1e-2, warmup_steps=2, schedule=schedule, weight_decay=0.1, **floor)


def _backend(folder, config: OptimizerConfig, dtype: Dtype = Dtype.FLOAT32) -> TorchBackend:
    return TorchBackend(folder, TrainerConfig(steps=7, groups_per_step=1, dtype=dtype, optimizer=config))


def _train(backend: TorchBackend, steps: int) -> list[tuple[float, float]]:
    made = []
    for step in range(backend.step, backend.step + steps):
        rng = np.random.default_rng(step)
        packed = PackedRows.of_rows([make_row(rng, f"t{i}", sampled=3 + i) for i in range(2)])
        backend.accumulate(packed, lambda outputs: (-outputs.logprobs.mean(), None))
        update = backend.update()
        made.append((update.grad_norm, update.lr))
    return made


def _weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def _masters(seed: int = 0) -> dict[str, nn.Parameter]:
    """A matrix large enough for 8-bit moments, one of a vocabulary, fused experts, a norm."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"body": (64, 96), "embed": (64, 96), "experts": (2, 8, 8), "norm": (64,)}
    masters = {n: nn.Parameter(0.02 * torch.randn(*shape, generator=random)) for n, shape in shapes.items()}
    zero_gradients(masters)
    return masters


def _drive(masters: dict[str, nn.Parameter], optimizer, steps: range) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for master in masters.values():
            master.grad = torch.randn(master.shape, generator=random)
        optimizer.step(1e-3 * (step + 1))


def test_every_kind_is_implemented():
    assert set(OPTIMIZERS) == set(OptimizerKind)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_in_the_middle_goes_on_bit_for_bit(kind, schedule, tmp_path):
    folder, config = save_model(tmp_path / "model"), _config(kind, schedule)
    straight = _backend(folder, config, Dtype.BFLOAT16)
    expected = _train(straight, 6)
    first = _backend(folder, config, Dtype.BFLOAT16)
    _train(first, 3)
    first.save(tmp_path / "saved")
    resumed = _backend(folder, config, Dtype.BFLOAT16)
    resumed.load(tmp_path / "saved")
    assert _train(resumed, 3) == expected[3:]
    for name, tensor in resumed.masters.items():
        assert torch.equal(tensor, straight.masters[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_large_masters_survives_too(kind):
    config, vocabulary = _config(kind), frozenset({"embed"})
    straight, half = _masters(), _masters()
    whole = open_optimizer(straight, config, vocabulary)
    _drive(straight, whole, range(6))
    before = open_optimizer(half, config, vocabulary)
    assert before.state() == {}
    _drive(half, before, range(3))
    state = {name: tensor.clone() for name, tensor in before.state().items()}
    after = open_optimizer(half, config, vocabulary)
    after.restore(state)
    _drive(half, after, range(3, 6))
    assert all(torch.equal(half[name], straight[name]) for name in straight)
    assert after.state().keys() == whole.state().keys()
    assert all(torch.equal(tensor, whole.state()[name]) for name, tensor in after.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_other_masters_or_another_kind_is_refused(kind):
    masters, config = _masters(), _config(kind)
    optimizer = open_optimizer(masters, config, frozenset())
    _drive(masters, optimizer, range(1))
    state = optimizer.state()
    other = OptimizerKind.ADAMW if kind is OptimizerKind.MUON else OptimizerKind.MUON
    with pytest.raises(CheckpointError, match="does not fit"):
        open_optimizer(_masters(), _config(other), frozenset()).restore(state)
    with pytest.raises(CheckpointError, match="does not fit"):
        optimizer.restore({name: tensor for name, tensor in state.items() if "norm" not in name})
    wrong = {name: tensor[:1] if tensor.ndim > 1 else tensor for name, tensor in state.items()}
    with pytest.raises(CheckpointError, match="another shape"):
        optimizer.restore(wrong)


def test_muon_moves_the_matrices_inside_and_adamw_the_rest():
    masters = _masters()
    optimizer = Muon(masters, _config(OptimizerKind.MUON), frozenset({"embed"}))
    assert optimizer.matrices == {"body"}
    twin = _masters()
    adamw = open_optimizer(twin, _config(OptimizerKind.ADAMW), frozenset())
    _drive(masters, optimizer, range(3))
    _drive(twin, adamw, range(3))
    assert [name for name in masters if not torch.equal(masters[name], twin[name])] == ["body"]


def test_muon_steps_are_orthogonal_and_of_adamws_size():
    masters = {"body": nn.Parameter(torch.zeros(32, 48))}
    masters["body"].grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    optimizer = Muon(masters, OptimizerConfig(kind=OptimizerKind.MUON), frozenset())
    optimizer.step(1e-3)
    singular = torch.linalg.svdvals(masters["body"].detach()) / (1e-3 * 0.2 * 48**0.5)
    assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.5  # Newton-Schulz stops about there
    size = float(masters["body"].detach().square().mean().sqrt())
    assert 0.1e-3 < size < 0.4e-3  # AdamW's steps have 0.2 to 0.4 lr


def test_tied_models_keep_their_embedding_from_muon(tmp_path):
    for tied in (True, False):
        backend = _backend(save_model(tmp_path / str(tied), tied=tied), _config(OptimizerKind.MUON))
        _train(backend, 1)
        backend.save(tmp_path / f"{tied}-saved")
        assert backend.step == 1


@pytest.mark.skipif(NO_8BIT, reason="bitsandbytes is not installed: pip install 'fathom-rl[adam8bit]'")
def test_8_bit_moments_take_a_quarter_and_train_alike():
    masters, twin = _masters(), _masters()
    small = open_optimizer(masters, _config(OptimizerKind.ADAM8BIT), frozenset())
    large = open_optimizer(twin, _config(OptimizerKind.ADAMW), frozenset())
    start = {name: master.detach().clone() for name, master in masters.items()}
    _drive(masters, small, range(4))
    _drive(twin, large, range(4))
    size = sum(t.nbytes for name, t in small.state().items() if name.endswith("/body") and "qmap" not in name)
    assert size < 0.27 * sum(t.nbytes for name, t in large.state().items() if name.endswith("/body"))
    for name in masters:
        moved, apart = twin[name].detach() - start[name], masters[name].detach() - twin[name].detach()
        assert float(apart.norm()) < 0.05 * float(moved.norm()), name


def test_options_that_a_kind_ignores_are_refused():
    with pytest.raises(ValidationError, match=r"momentum changes nothing with kind = 'adamw'"):
        OptimizerConfig(momentum=0.9)
    with pytest.raises(ValidationError, match="min_lr_ratio changes nothing"):
        OptimizerConfig(min_lr_ratio=0.5)
    assert OptimizerConfig(kind=OptimizerKind.MUON, momentum=0.9).momentum == 0.9
