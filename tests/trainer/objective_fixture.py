"""The shared batch of the worked examples, flattened: only the tokens with loss, float64 unless asked otherwise."""

import json
from pathlib import Path
from typing import Any

import torch

from fathom.config.families import Correction
from fathom.config.objective import ObjectiveConfig
from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.step import GroupBatch
from fathom.trainer.objective.advantages import group_advantages
from fathom.trainer.objective.corrections import SampledTokens
from fathom.trainer.objective.objective import micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import StepPlan, StepTokens

torch.set_num_threads(1)

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("objective_vectors.json").read_text())
FIXTURE = VECTORS["fixture"]
MASK = [bool(m) for row in FIXTURE["mask"] for m in row]
SEQUENCE = torch.tensor([i for i, row in enumerate(FIXTURE["mask"]) for m in row if m])
SEQUENCES = len(FIXTURE["mask"])


def flat(rows: list[list[float]]) -> torch.Tensor:
    """The tokens with loss of a nested list."""
    values = [value for row in rows for value in row]
    return torch.tensor([value for value, mask in zip(values, MASK, strict=True) if mask], dtype=torch.float64)


def group_of(rewards: list[float]) -> GroupBatch:
    return GroupBatch(
        group=GroupId("g"),
        rewards={TrajectoryId(f"g/m{i}"): reward for i, reward in enumerate(rewards)},
        truncated=frozenset(),
        rows=(),
    )


def advantages(config: ObjectiveConfig, rewards: list[float]) -> list[float]:
    return list(group_advantages(config.advantage, group_of(rewards).rewards).values())


def loss_of(config: ObjectiveConfig, plan: StepPlan, logp: torch.Tensor, entropy: torch.Tensor | None = None):
    """What a micro-batch contributes, from its log-probabilities."""
    return micro_batch_loss(config, plan, TokenOutputs(logprobs=logp, entropy=entropy))


def fixture_tokens(
    config: ObjectiveConfig, *, old: str | None = "logp_old", ref: bool = False, dtype: torch.dtype = torch.float64
) -> StepTokens:
    advantage = torch.tensor(advantages(config, FIXTURE["reward"]), dtype=dtype)
    return StepTokens(
        sequence=SEQUENCE,
        sequences=SEQUENCES,
        advantage=advantage[SEQUENCE],
        truncated=torch.zeros(len(SEQUENCE), dtype=torch.bool),
        logp_behaviour=flat(FIXTURE["logp_rollout"]).to(dtype),
        logp_old=None if old is None else flat(FIXTURE[old]).to(dtype),
        logp_ref=flat(FIXTURE["logp_ref"]).to(dtype) if ref else None,
    )


def sampled() -> SampledTokens:
    """What corrections see of the fixture."""
    log_ratio = flat(FIXTURE["logp_old"]) - flat(FIXTURE["logp_rollout"])
    return SampledTokens(
        log_ratio=log_ratio,
        logp_behaviour=flat(FIXTURE["logp_rollout"]),
        sequence=SEQUENCE,
        sequences=SEQUENCES,
    )


def theta(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return flat(FIXTURE["logp_theta"]).to(dtype).requires_grad_()


PLAIN = ObjectiveConfig(correction=Correction.NONE)
"""PPO clip .2/.28 on GRPO advantages, no weights."""


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-11,
    )
