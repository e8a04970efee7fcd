"""Every named objective through the whole trainer: the cut, the order and the rows of a trajectory change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_rows import make_group, make_row, save_model

from fathom.config.families import AdvantageSource, KlPlacement, ObjectiveKind, Proximal
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import CriticConfig, OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import ConfigError
from fathom.core.records.step import TrainBatch
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer
from fathom.trainer.objective.credit.assign import by_token

NEEDED = {
    ObjectiveKind.DR_GRPO: {"constant_length": 8},
    ObjectiveKind.DAPO: {"overlong_limit": 8, "overlong_buffer": 2},
}
OBJECTIVES = [
    *(ObjectiveConfig(kind=kind, **NEEDED.get(kind, {})) for kind in ObjectiveKind),
    ObjectiveConfig(proximal=Proximal.LOGLINEAR, veto=1e-4, entropy_coefficient=0.01),
    ObjectiveConfig(kl_coefficient=0.1, kl_placement=KlPlacement.REWARD, off_policy_mask=0.0),
    ObjectiveConfig(kind=ObjectiveKind.REINFORCE_PP, kl_coefficient=0.1, kl_placement=KlPlacement.REWARD, gamma=0.9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def batch_of(version: int = 0) -> TrainBatch:
    """Two groups of three trajectories and one of a single member; the first trajectory of each has two rows."""
    rng = np.random.default_rng(0)
    groups = []
    for name, members in (("g0", 3), ("g1", 3), ("g2", 1)):
        rows = [make_row(rng, f"{name}/t{i}", prompt=2 + i, sampled=3 + 2 * i, version=version) for i in range(members)]
        rows.append(make_row(rng, f"{name}/t0", prompt=6, sampled=2, branch=1, version=version))
        groups.append(make_group(rows, [1.0, 0.0, 0.25][:members], name))
    return TrainBatch(groups=tuple(groups))


def step(folder, objective: ObjectiveConfig, batch: TrainBatch, budget: int = 4096, steps_on_a_batch: int = 1):
    """(weights after the steps, critic's values after them, outcomes)."""
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-3))
    config = TrainerConfig(
        steps=2,
        groups_per_step=3,
        steps_on_a_batch=steps_on_a_batch,
        tokens_per_micro_batch=budget,
        optimizer=OptimizerConfig(lr=1e-4, eps=1e-3),  # an epsilon that keeps Adam from making much of rounding
        critic=critic if objective.declaration.advantages is AdvantageSource.CRITIC else None,
    )
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, objective, StalenessConfig(max_staleness=2))
    trainer.begin()
    outcomes = list(trainer.steps(batch, 0))
    weights = torch.cat([tensor.detach().flatten() for tensor in backend.weights().values()])
    return weights, outcomes


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.kind}-{o.proximal}-{o.kl_placement}")
def test_cut_and_order_change_nothing(folder, objective):
    batch = batch_of()
    turned = TrainBatch(groups=tuple(replace(group, rows=group.rows[::-1]) for group in batch.groups[::-1]))
    expected, (before,) = step(folder, objective, batch)
    assert before.stepped
    assert np.isfinite(before.metrics.loss)
    for made, (after,) in (step(folder, objective, batch, budget=13), step(folder, objective, turned, budget=30)):
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
        assert after.metrics.loss == pytest.approx(before.metrics.loss, abs=2e-6)
        assert after.metrics.grad_norm == pytest.approx(before.metrics.grad_norm, rel=1e-4, abs=1e-7)
        assert after.metrics.tokens == before.metrics.tokens
    if objective.declaration.advantages is AdvantageSource.CRITIC:
        assert before.metrics.value_loss is not None
        assert before.metrics.critic_grad_norm is not None
    else:
        assert before.metrics.value_loss is before.metrics.critic_grad_norm is None
    has_own = [row.advantages is not None for row in before.rows]
    assert all(has_own) if by_token(objective) else not any(has_own)
    assert (before.metrics.vocabulary_entropy is not None) == (objective.entropy_coefficient > 0)


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(kind=ObjectiveKind.GSPO, clip_low=0.1, clip_high=0.1),
        ObjectiveConfig(proximal=Proximal.LOGLINEAR, veto=1e-4),
        ObjectiveConfig(off_policy_mask=0.0),
        ObjectiveConfig(kind=ObjectiveKind.PPO),
    ],
    ids=lambda o: f"{o.kind}-{o.proximal}",
)
def test_a_later_step_on_a_batch_measures_the_policy_anew(folder, objective):
    batch = batch_of()
    expected, before = step(folder, objective, batch, steps_on_a_batch=2)
    made, after = step(folder, objective, batch, budget=13, steps_on_a_batch=2)
    assert [outcome.stepped for outcome in before] == [True, True]
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=2e-6)
    assert [o.metrics.loss for o in after] == pytest.approx([o.metrics.loss for o in before], abs=5e-6)


def test_a_critic_learns_the_returns(folder):
    objective = ObjectiveConfig(kind=ObjectiveKind.PPO)
    config = TrainerConfig(
        steps=40,
        groups_per_step=3,
        optimizer=OptimizerConfig(lr=1e-6),
        critic=CriticConfig(warmup_steps=39, optimizer=OptimizerConfig(lr=1e-2)),
    )
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, objective, StalenessConfig(max_staleness=40))
    trainer.begin()
    before = torch.cat([tensor.detach().flatten().clone() for tensor in backend.weights().values()])
    losses = [outcome.metrics.value_loss for version in range(15) for outcome in trainer.steps(batch_of(), version)]
    assert losses[-1] < 0.5 * losses[0]
    after = torch.cat([tensor.detach().flatten() for tensor in backend.weights().values()])
    assert torch.equal(before, after), "the critic warms up alone"


def test_a_critic_that_is_missing_is_refused(folder):
    config = TrainerConfig(steps=2, groups_per_step=3)
    with pytest.raises(ConfigError, match=r"add \[trainer\.critic\]"):
        Trainer(TorchBackend(folder, config), config, ObjectiveConfig(kind=ObjectiveKind.PPO), StalenessConfig())
