"""Random objectives and random steps of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from fathom.config.families import (
    AdvantageSource,
    Aggregation,
    Correction,
    KlEstimator,
    ObjectiveKind,
    PolicyLossKind,
    Proximal,
    RejectionDenominator,
)
from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives import OBJECTIVES
from fathom.config.objectives.declaration import LOSS_OPTIONS
from fathom.trainer.objective.credit.value_loss import ValueSums, value_micro_batch_loss
from fathom.trainer.objective.objective import LossSums, LossTerms, micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import StepPlan, StepTokens, needs_now_pass, needs_old_pass, prepare_step

torch.set_num_threads(1)

Loss = Callable[[ObjectiveConfig, StepPlan, TokenOutputs], LossTerms]

BOUNDS: dict[Correction, dict[str, float]] = {
    Correction.NONE: {},
    Correction.TOKEN_TIS: {},
    Correction.ICEPOP: {"correction_low": 0.5, "correction_high": 5.0},
    Correction.SEQUENCE_TIS: {},
    Correction.SEQUENCE_MIS: {"correction_low": 0.2, "correction_high": 4.0},
    Correction.GEOMETRIC_RS: {"correction_low": 0.7, "correction_high": 1.4},
    Correction.TOKEN_RS: {"correction_low": 0.5},
    Correction.K2_RS: {"correction_high": 0.15},
    Correction.K3_RS: {"correction_high": 0.15},
    Correction.KPOP: {"correction_high": 0.05},
}
NEEDED: dict[ObjectiveKind, dict[str, Any]] = {
    ObjectiveKind.DR_GRPO: {"constant_length": 7},
    ObjectiveKind.DAPO: {"overlong_limit": 20, "overlong_buffer": 5},
}
"""Options that a kind requires."""
BY_TRAJECTORY = (
    Correction.NONE,
    Correction.SEQUENCE_TIS,
    Correction.SEQUENCE_MIS,
    Correction.GEOMETRIC_RS,
    Correction.K2_RS,
    Correction.K3_RS,
)


def corrections_of(kind: ObjectiveKind, proximal: Proximal | None) -> tuple[Correction, ...]:
    loss = OBJECTIVES[kind].loss
    if proximal is Proximal.BYPASS or loss in (PolicyLossKind.SIGNED_REGION, PolicyLossKind.REGION):
        return (Correction.NONE,)
    return BY_TRAJECTORY if loss is PolicyLossKind.SEQUENCE_CLIP else tuple(Correction)


@st.composite
def configs(draw: Any, kinds: tuple[ObjectiveKind, ...] = tuple(ObjectiveKind)) -> ObjectiveConfig:
    kind = draw(st.sampled_from(kinds))
    declaration, options = OBJECTIVES[kind], dict(NEEDED.get(kind, {}))
    if declaration.loss in LOSS_OPTIONS["proximal"]:
        options["proximal"] = draw(st.sampled_from(Proximal))
    if declaration.loss in LOSS_OPTIONS["dual_clip"]:
        options["dual_clip"] = draw(st.sampled_from((None, 2.0)))
    if declaration.loss is PolicyLossKind.SEQUENCE_CLIP and draw(st.booleans()):
        options |= {"clip_low": 0.1, "clip_high": 0.1}
    correction = draw(st.sampled_from(corrections_of(kind, options.get("proximal"))))
    options |= {"correction": correction, **BOUNDS[correction]}
    if correction is not Correction.NONE:
        options["batch_normalise"] = draw(st.booleans())
    if "aggregation" not in declaration.decides:
        aggregation = draw(st.sampled_from(Aggregation))
        options["aggregation"] = aggregation
        if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            options["constant_length"] = 7
    return ObjectiveConfig(
        kind=kind,
        veto=draw(st.sampled_from((None, 0.05))),
        off_policy_mask=draw(st.sampled_from((None, 0.05))),
        rejection_denominator=draw(st.sampled_from(RejectionDenominator)),
        kl_coefficient=0.1,
        kl_estimator=draw(st.sampled_from((KlEstimator.K2, KlEstimator.K3))),
        entropy_coefficient=draw(st.sampled_from((0.0, 0.01))),
        mask_truncated=draw(st.booleans()),
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class RandomStep:
    """Rows of a step, a way to cut them, and a seed of the figures."""

    sequences: int
    """Trajectories; some may have no row."""
    rows: list[tuple[int, int]]
    """Length and trajectory of each row."""
    order: list[int]
    """A permutation of the rows."""
    cuts: list[int]
    """Where the permuted rows are cut into micro-batches; some may be empty."""
    seed: int
    """Of the figures."""

    @property
    def whole(self) -> list[torch.Tensor]:
        """All tokens in one micro-batch."""
        return [torch.arange(sum(length for length, _ in self.rows))]

    @property
    def cut(self) -> list[torch.Tensor]:
        """Indices of the tokens of each micro-batch."""
        starts = [0, *itertools.accumulate(length for length, _ in self.rows)]
        return [
            torch.tensor([t for row in self.order[a:b] for t in range(starts[row], starts[row + 1])], dtype=torch.int64)
            for a, b in itertools.pairwise([0, *self.cuts, len(self.rows)])
        ]

    @property
    def sequence(self) -> torch.Tensor:
        """Int64 [N]: the trajectory of each token."""
        return torch.tensor([trajectory for length, trajectory in self.rows for _ in range(length)])


@st.composite
def steps(draw: Any) -> RandomStep:
    sequences = draw(st.integers(1, 5))
    rows = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, sequences - 1)), min_size=1, max_size=8))
    return RandomStep(
        sequences=sequences,
        rows=rows,
        order=draw(st.permutations(range(len(rows)))),
        cuts=sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4))),
        seed=draw(st.integers(0, 2**31)),
    )


def random_tokens(
    config: ObjectiveConfig, step: RandomStep, dtype: torch.dtype
) -> tuple[StepTokens, torch.Tensor, torch.Tensor]:
    """(tokens, log-probabilities, entropies). In every third step one token has no finite old log-probability."""
    random, sequence = torch.Generator().manual_seed(step.seed), step.sequence

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(sequence), generator=random, dtype=torch.float64)

    old = -3 * torch.rand(len(sequence), generator=random, dtype=torch.float64)
    behaviour, theta, reference = old + noise(0.6), (old + noise(0.3)).to(dtype), old + noise(0.5)
    advantage = torch.randn(step.sequences, generator=random, dtype=torch.float64)[sequence]
    if config.declaration.advantages is not AdvantageSource.GROUP:
        advantage = advantage + noise(0.5)
    if step.seed % 3 == 0:
        old[0] = float("nan")
    tokens = StepTokens(
        sequence=sequence,
        sequences=step.sequences,
        advantage=advantage.to(dtype),
        truncated=(torch.rand(step.sequences, generator=random) < 0.3)[sequence],
        logp_behaviour=behaviour.to(dtype),
        logp_old=old.to(dtype),
        logp_now=theta.clone() if needs_now_pass(config) else None,
        logp_ref=reference.to(dtype),
        blend=torch.rand(len(sequence), generator=random).to(dtype) if config.proximal is Proximal.LOGLINEAR else None,
        values=noise(1.0).to(dtype),
        returns=noise(1.0).to(dtype),
    )
    return tokens, theta, noise(1.0).abs().to(dtype)


def without_old_pass(config: ObjectiveConfig, tokens: StepTokens) -> StepTokens:
    """The tokens of a step before which nothing was scored, where the objective allows that."""
    return tokens if needs_old_pass(config, 1) else replace(tokens, logp_old=None)


def run(
    config: ObjectiveConfig,
    tokens: StepTokens,
    theta: torch.Tensor,
    entropy: torch.Tensor,
    micro_batches: list[torch.Tensor],
    loss: Loss = micro_batch_loss,
) -> tuple[LossSums, torch.Tensor]:
    """Sums of a step and its gradient with respect to log-probabilities, then entropies."""
    plan, logp, spread = prepare_step(config, tokens), theta.clone().requires_grad_(), entropy.clone().requires_grad_()
    sums = LossSums()
    for index in micro_batches:
        terms = loss(config, plan.take(index), TokenOutputs(logprobs=logp[index], entropy=spread[index]))
        terms.loss.backward()
        sums += terms.sums
    assert logp.grad is not None
    return sums, torch.cat((logp.grad, torch.zeros_like(logp) if spread.grad is None else spread.grad))


def run_values(
    config: ObjectiveConfig, tokens: StepTokens, values: torch.Tensor, micro_batches: list[torch.Tensor]
) -> tuple[ValueSums, torch.Tensor]:
    """The same of a critic."""
    plan, made, sums = prepare_step(config, tokens), values.clone().requires_grad_(), ValueSums()
    for index in micro_batches:
        loss, numbers = value_micro_batch_loss(config, plan.take(index), made[index])
        loss.backward()
        sums += numbers
    assert made.grad is not None
    return sums, made.grad
