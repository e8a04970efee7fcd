"""One trainer process of several: `python ranked_process.py RANK SIZE MEETING MODEL OUT`. Size 1 is one alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from random_rows import make_group, make_row

from fathom.config.families import KlPlacement, ObjectiveKind
from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives.declaration import RecordField
from fathom.config.trainer import CriticConfig, OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.records.step import TrainBatch
from fathom.trainer.backends.ranks.ranked_backend import RankedBackend
from fathom.trainer.backends.ranks.ranks import Ranks
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer
from fathom.trainer.objective.objective import micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import StepTokens, prepare_step

EXTRAS = {
    ObjectiveKind.DAPO: {"overlong_limit": 8, "overlong_buffer": 4},
    ObjectiveKind.DR_GRPO: {"constant_length": 16},
    ObjectiveKind.GRPO: {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    ObjectiveKind.REINFORCE_PP: {"kl_coefficient": 0.1, "kl_placement": KlPlacement.REWARD},
}


def objective(kind: ObjectiveKind) -> ObjectiveConfig:
    return ObjectiveConfig(kind=kind, **EXTRAS.get(kind, {}))


def batch() -> TrainBatch:
    """Two groups: trajectories of one and two rows, kept sets, a truncated one; and a group of one."""
    rng = np.random.default_rng(3)
    rows = [make_row(rng, f"a/t{i}", prompt=2 + i, sampled=2 + 2 * i, kept=i == 1) for i in range(4)]
    rows.append(make_row(rng, "a/t1", prompt=7, sampled=2, branch=1))
    more = [replace(make_row(rng, f"b/t{i}", sampled=1 + i), group="b") for i in range(3)]
    groups = (
        make_group(rows, [1.0, 0.0, 0.3, 1.0], "a", truncated=["a/t2"]),
        make_group(more, [0.0, 1.0, 0.5], "b"),
        make_group([replace(make_row(rng, "c/t0", sampled=3), group="c")], [1.0], "c"),
    )
    return TrainBatch(groups=groups)


def of_the_objective(kind: ObjectiveKind, ranks: Ranks | None) -> np.ndarray:
    """float64 [N]: the gradient of the step's loss, by shares of rows whose numbers are exchanged."""
    config, lengths = objective(kind), [3, 5, 2, 4, 4, 1]
    random = torch.Generator().manual_seed(5)
    total = sum(lengths)

    def drawn(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=random, dtype=torch.float64)

    old = -2 + drawn(0.5)
    tokens = StepTokens(
        sequence=torch.repeat_interleave(torch.tensor([0, 1, 2, 1, 3, 4]), torch.tensor(lengths)),
        sequences=6,
        advantage=drawn(1.0),
        truncated=torch.zeros(total, dtype=torch.bool),
        logp_behaviour=old + drawn(0.1),
        logp_old=old,
        logp_now=old,
        logp_ref=old + drawn(0.3) if config.reference else None,
        values=drawn(1.0),
        returns=drawn(1.0),
    )
    theta, plan = old + drawn(0.2), prepare_step(config, tokens)
    entropy = drawn(0.1).abs()
    gradient = torch.zeros(total, dtype=torch.float64)
    ends = np.cumsum(lengths)
    for rows in ([0, 1, 2], [3], [4, 5]):  # three micro-batches
        places = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in rows])
        mine = list(range(len(rows))) if ranks is None else ranks.share([lengths[row] for row in rows])
        starts = np.cumsum([0, *(lengths[row] for row in rows)])
        own = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in mine] or [np.zeros(0)]).astype(np.int64)
        leaf = theta[places][own].clone().requires_grad_()
        whole = leaf if ranks is None else ranks.complete(leaf, own, len(places))
        outputs = TokenOutputs(logprobs=whole, entropy=entropy[places])
        loss = micro_batch_loss(config, plan.take(torch.from_numpy(places)), outputs).loss
        if len(own):
            loss.backward()
            gradient[places[own]] += leaf.grad
    if ranks is not None:
        ranks.add_up(gradient)
    return gradient.numpy()


class Watched:
    """A backend, or a critic, that keeps the gradients it was about to step by."""

    def __init__(self, watched) -> None:
        self._watched = watched
        self.gradients: list[np.ndarray] = []
        critic = getattr(watched, "critic", None)
        self.critic = None if critic is None else Watched(critic)

    def __getattr__(self, name):
        return getattr(self._watched, name)

    def update(self, **options):
        masters = self._watched.masters.values()
        self.gradients.append(torch.cat([master.grad.flatten() for master in masters]).numpy().copy())
        return self._watched.update(**options)


def of_the_trainer(kind: ObjectiveKind, ranks: Ranks | None, model: Path, out: Path) -> dict[str, np.ndarray]:
    """Gradients, loss and norms of two steps, log-probabilities after them, and what a critic says."""
    config, critic = objective(kind), None
    if RecordField.VALUES in config.declaration.needs:
        critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-3))
    several = RecordField.ONE_STEP not in config.declaration.needs
    trainer_config = TrainerConfig(
        steps=2,
        groups_per_step=3,
        steps_on_a_batch=2 if several else 1,
        tokens_per_micro_batch=30,
        optimizer=OptimizerConfig(lr=1e-4),
        critic=critic,
    )
    watched = Watched(TorchBackend(model, trainer_config))
    backend = watched if ranks is None else RankedBackend(watched, ranks)
    trainer = Trainer(backend, trainer_config, config, StalenessConfig(max_staleness=2))
    trainer.begin()
    outcomes = list(trainer.steps(batch(), 0))
    assert all(outcome.stepped for outcome in outcomes)
    rows = [row for group in batch().groups for row in group.rows]
    found = {
        "gradient": np.concatenate(watched.gradients),
        "loss": np.array([outcome.metrics.loss for outcome in outcomes]),
        "norm": np.array([outcome.metrics.grad_norm for outcome in outcomes]),
        "tokens": np.array([outcome.metrics.tokens for outcome in outcomes]),
        "logprobs": np.concatenate(trainer.logprobs(rows)),
    }
    if critic is not None:
        found["critic_gradient"] = np.concatenate(watched.critic.gradients)
        found["value_loss"] = np.array([outcome.metrics.value_loss for outcome in outcomes])
    backend.save(out / f"saved-{kind}")
    return found


def main(rank: int, size: int, meeting: Path, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, size, meeting, timeout_s=60) if size > 1 else None
    found: dict[str, np.ndarray] = {}
    for kind in ObjectiveKind:
        found[f"objective/{kind}"] = of_the_objective(kind, ranks)
        found |= {f"{name}/{kind}": value for name, value in of_the_trainer(kind, ranks, model, out).items()}
    np.savez(out / f"rank{rank}.npz", **found)
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
