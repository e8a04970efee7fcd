"""The value model: its values, what its gradient is of, and that a resume goes on bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from random_rows import make_group, make_row, save_model

from fathom.config.families import Dtype, ObjectiveKind, OptimizerKind
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import CriticConfig, OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import CheckpointError
from fathom.core.records.step import TrainBatch
from fathom.trainer.backends.critic import ValueModel
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

CONFIG = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tied=request.param)


def _rows(seed=0, count=3):
    rng = np.random.default_rng(seed)
    return [make_row(rng, f"t{i}", prompt=2 + i, sampled=3 + i) for i in range(count)]


def _fit(critic, steps, first=0):
    """Teach it that a value is the number of tokens left."""
    losses = []
    for step in range(first, first + steps):
        rows = _rows(step)
        left = torch.from_numpy(np.concatenate([np.arange(len(r.positions), 0, -1) for r in rows])).float()
        losses.append(critic.accumulate(PackedRows.of_rows(rows), _squared(left)))
        assert critic.update().applied
    return losses


def _squared(target):
    def loss_of(values):
        loss = (values - target).square().mean()
        return loss, float(loss.detach())

    return loss_of


def _critic(folder, config=CONFIG):
    critic = ValueModel(folder, config, device="cpu")
    critic.begin({}, 60)
    return critic


def test_values_start_at_zero_and_learn(folder):
    critic = _critic(folder)
    assert critic.values(PackedRows.of_rows(_rows())).tolist() == [0.0] * 12
    losses = _fit(critic, 60)
    assert np.mean(losses[-5:]) < 0.2 * losses[0]


def test_packed_values_are_those_of_each_row_alone_and_know_nothing_of_their_token(folder):
    critic, rows = _critic(folder), _rows()
    _fit(critic, 3)
    packed = critic.values(PackedRows.of_rows(rows))
    alone = torch.cat([critic.values(PackedRows.of_rows([row])) for row in rows])
    assert torch.allclose(packed, alone, atol=1e-5)
    assert packed.dtype is torch.float32
    changed = rows[0].token_ids.copy()
    changed[-1] += 1 if changed[-1] == 0 else -1
    other = critic.values(PackedRows.of_rows([replace(rows[0], token_ids=changed)]))
    assert torch.allclose(other, packed[:3], atol=1e-6)


def test_a_resume_goes_on_bit_for_bit(folder, tmp_path):
    for kind in (OptimizerKind.ADAMW, OptimizerKind.MUON):
        config = CriticConfig(optimizer=CONFIG.optimizer.model_copy(update={"kind": kind}))
        straight = _critic(folder, config)
        expected = _fit(straight, 6)
        first = _critic(folder, config)
        _fit(first, 3)
        first.save(tmp_path / kind)
        resumed = ValueModel(folder, config, device="cpu")
        resumed.load(tmp_path / kind)
        assert _fit(resumed, 3, first=3) == expected[3:]
        packed = PackedRows.of_rows(_rows(9))
        assert torch.equal(resumed.values(packed), straight.values(packed))
        assert resumed.step == 6


def test_it_is_saved_with_the_policy_and_is_not_among_its_weights(folder, tmp_path):
    config = TrainerConfig(steps=9, groups_per_step=1, dtype=Dtype.BFLOAT16, critic=CONFIG)
    backend = TorchBackend(folder, config)
    critic = backend.critic
    assert critic is not None
    critic.begin(backend.weights(), 9)
    _fit(critic, 3)
    assert not [name for name in backend.weights() if "value_head" in name]
    assert all(tensor.dtype is torch.bfloat16 for tensor in backend.weights().values())
    backend.save(tmp_path)
    resumed = TorchBackend(folder, config)
    resumed.load(tmp_path)
    packed = PackedRows.of_rows(_rows(9))
    assert torch.equal(resumed.critic.values(packed), critic.values(packed))
    assert not any("value_head" in path.name for path in (tmp_path / "model").iterdir())
    (tmp_path / "critic" / "critic.json").unlink()
    with pytest.raises(CheckpointError, match="critic"):
        resumed.load(tmp_path)


def test_it_begins_as_the_policy_is_then(folder):
    backend = TorchBackend(folder, TrainerConfig(steps=9, groups_per_step=1, critic=CONFIG))
    for step in range(2):
        backend.accumulate(PackedRows.of_rows(_rows(step)), lambda outputs: (-outputs.logprobs.mean(), None))
        backend.update()
    seen = []
    for weights in ({}, backend.weights()):
        critic = ValueModel(folder, CONFIG, device="cpu")
        critic.begin(weights, 9)
        _fit(critic, 1)
        seen.append(critic.values(PackedRows.of_rows(_rows(4))))
    assert not torch.allclose(*seen)


def test_steps_that_train_the_critic_alone_count_and_move_nothing_else(folder, tmp_path):
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=2)
    config = TrainerConfig(steps=9, groups_per_step=1, optimizer=optimizer, critic=CONFIG)
    backend = TorchBackend(folder, config)
    before = {name: tensor.detach().clone() for name, tensor in backend.weights().items()}

    def step(backend, hold):
        backend.accumulate(PackedRows.of_rows(_rows(1)), lambda outputs: (-outputs.logprobs.mean(), None))
        return backend.update(hold=hold)

    held = [step(backend, True) for _ in range(2)]
    assert [(update.applied, update.lr) for update in held] == [(True, 0.0)] * 2
    assert held[0].grad_norm > 0
    assert backend.step == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights().items())
    backend.save(tmp_path)
    resumed = TorchBackend(folder, config)
    resumed.load(tmp_path)
    assert resumed.step == 2
    fresh = TorchBackend(folder, config)
    moved = [step(each, False) for each in (backend, resumed, fresh)]
    assert moved[0] == moved[1]
    assert moved[0].lr == pytest.approx(optimizer.lr / 2)  # its schedule starts after the held steps
    assert moved[2].lr == moved[0].lr


def _ppo(folder, *, begin=True):
    optimizer = OptimizerConfig(lr=1e-3)
    critic = CriticConfig(warmup_steps=2, optimizer=OptimizerConfig(lr=1e-2))
    config = TrainerConfig(steps=6, groups_per_step=1, steps_on_a_batch=2, optimizer=optimizer, critic=critic)
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, ObjectiveConfig(kind=ObjectiveKind.PPO), StalenessConfig(max_staleness=9))
    if begin:
        trainer.begin()
    return trainer, backend


def _steps(trainer, batches):
    outcomes = []
    for _ in range(batches):
        rows = _rows(trainer.version, count=4)
        batch = TrainBatch(groups=(make_group(rows, [1.0, 0.0, 0.5, 1.0]),))
        outcomes += trainer.steps(batch, trainer.version)
    return outcomes


def test_ppo_trains_both_and_says_how_the_critic_does(folder):
    trainer, backend = _ppo(folder)
    before = {name: tensor.detach().clone() for name, tensor in backend.weights().items()}
    first, second, third, *_ = _steps(trainer, 2)
    # values are 0 before the first step, so that returns are all it is wrong by
    assert first.metrics.explained_variance in (None, pytest.approx(0.0, abs=1e-6))
    assert first.metrics.value_loss > 0
    assert (first.metrics.lr, second.metrics.lr, third.metrics.lr) == (0.0, 0.0, 1e-3)
    assert all(outcome.stepped and outcome.metrics.critic_grad_norm > 0 for outcome in (first, second, third))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in backend.weights().items())
    # its tokens have advantages of their own
    assert all(len(set(row.advantages.tolist())) > 1 for row in third.rows if len(row.positions) > 2)


def test_a_ppo_run_resumes_bit_for_bit(folder, tmp_path):
    straight, backend = _ppo(folder)
    expected = _steps(straight, 3)
    first, first_backend = _ppo(folder)
    _steps(first, 1)  # the critic alone
    first_backend.save(tmp_path / "one")
    resumed, resumed_backend = _ppo(folder, begin=False)
    resumed_backend.load(tmp_path / "one")
    middle = _steps(resumed, 1)
    resumed_backend.save(tmp_path / "two")
    last, last_backend = _ppo(folder, begin=False)
    last_backend.load(tmp_path / "two")
    again = middle + _steps(last, 1)
    for left, right in zip(expected[2:], again, strict=True):
        for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm", "lr"):
            assert getattr(left.metrics, name) == getattr(right.metrics, name)
    for name, tensor in backend.weights().items():
        assert torch.equal(tensor, last_backend.weights()[name])
    packed = PackedRows.of_rows(_rows(9))
    assert torch.equal(backend.critic.values(packed), last_backend.critic.values(packed))


def test_a_gradient_that_is_not_finite_changes_nothing(folder):
    critic, packed = _critic(folder), PackedRows.of_rows(_rows())
    _fit(critic, 1)
    before = critic.values(packed)
    critic.accumulate(packed, lambda values: (values.sum() * float("nan"), None))
    assert not critic.update().applied
    assert critic.step == 1
    assert torch.equal(critic.values(packed), before)


def test_a_critic_that_leaves_the_policy_no_step_is_refused():
    with pytest.raises(ValidationError, match="leaves the policy none of 5 steps"):
        TrainerConfig(steps=5, groups_per_step=1, critic=CriticConfig(warmup_steps=5))
