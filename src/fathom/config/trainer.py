"""The trainer: device, precision, optimizer, batches."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fathom.config.families import Dtype, OnStale, OptimizerKind, ReferenceKind, Schedule
from fathom.config.section import DEVICE, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """How float32 masters follow their gradient."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """AdamW, Muon, or AdamW with moments of 8 bits."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Adam's decay rates."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    momentum: float = Field(default=0.95, gt=0, lt=1)
    """Muon's decay rate. `muon` only; `betas` and `eps` are of its AdamW part."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.CONSTANT
    """What follows the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak at the end of a linear or cosine schedule."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind is not OptimizerKind.MUON and "momentum" in self.model_fields_set:
            raise ValueError(f"momentum changes nothing with kind = '{self.kind}'; remove it")
        if self.schedule is Schedule.CONSTANT and "min_lr_ratio" in self.model_fields_set:
            raise ValueError("min_lr_ratio changes nothing with schedule = 'constant'; remove it")
        return self


class ReferenceConfig(Section):
    """The weights that a KL penalty is measured against (`objective.kl_coefficient`)."""

    kind: ReferenceKind = ReferenceKind.FROZEN
    """Those RL started from; those of the latest of every so many steps; or an average of the policy's."""
    every_steps: int | None = Field(default=None, gt=0)
    """Steps after which the policy becomes the reference again. `periodic` only, which requires it."""
    decay: float | None = Field(default=None, gt=0, lt=1)
    """Share of the average that a step keeps; the new weights are the rest. `ema` only, which requires it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for option, kind in (("every_steps", ReferenceKind.PERIODIC), ("decay", ReferenceKind.EMA)):
            given = getattr(self, option) is not None
            if given and self.kind is not kind:
                raise ValueError(f"{option} changes nothing with kind = '{self.kind}'; remove it, or set '{kind}'")
            if not given and self.kind is kind:
                raise ValueError(f"kind = '{kind}' needs {option}; set it")
        return self


class CriticConfig(Section):
    """A value model: a copy of the policy's body as RL starts, with a scalar head. It is never published."""

    warmup_steps: int = Field(default=0, ge=0)
    """First steps that train the critic alone. They count as steps, the policy stays as it is; its own learning-rate
    schedule starts after them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The critic's optimizer."""


class TrainerConfig(Section):
    """One training process."""

    steps: int = Field(gt=0, lt=2**31)
    """Optimizer steps to take."""
    groups_per_step: int = Field(gt=0)
    """Groups in one batch."""
    steps_on_a_batch: int = Field(default=1, gt=0)
    """Optimizer steps that share a batch; its rows are split, each trained once."""
    tokens_per_micro_batch: int = Field(default=4096, gt=0)
    """Packed tokens in one forward; a longer single row is a micro-batch of its own. Never changes the result."""
    share_prefixes: bool = True
    """Compute what rows of a micro-batch begin with alike once, in whole pages of 32 tokens, and put such rows
    together; not where rows have recorded routes. Never changes the result."""
    dtype: Dtype = Dtype.FLOAT32
    """Element type of the forward and of the published weights. Masters stay float32."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Torch device."""
    threads: int = Field(default=1, gt=0, le=1024)
    """CPU threads."""
    replay_routes: bool = False
    """Use the experts that the engine recorded (R3), in the log-probabilities before a step and in the step. Gates are
    computed from the trainer's own logits. Needs `rollout.record_routes`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    reference: ReferenceConfig = ReferenceConfig()
    """The KL penalty's reference."""
    critic: CriticConfig | None = None
    """The value model of `objective.kind = "ppo"`, which requires it. None: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves the policy none of {self.steps} steps; "
                "lower it"
            )
        return self


class WarmStartConfig(Section):
    """A supervised phase before RL, with its own step counter. RL starts at version 0 after it."""

    steps: int = Field(gt=0)
    """Optimizer steps at most."""
    until_loss: float | None = Field(default=None, gt=0)
    """End early once the mean loss of the last 10 steps is at most this. None: take all steps."""
    batch_size: int = Field(default=32, gt=0)
    """Demonstrations per step."""
    tasks: int = Field(gt=0)
    """How many training tasks are demonstrated."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """The optimizer of this phase."""


class CheckpointConfig(Section):
    """When the run can be resumed from."""

    every_steps: int = Field(default=10, gt=0)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, gt=0)
    """Complete checkpoints to keep."""


class StalenessConfig(Section):
    """The clock: how old a token may be when it is trained."""

    max_staleness: int = Field(default=2, ge=0)
    """S: no token older than this has a gradient. 0 is the synchronous run."""
    max_kv_staleness: int | None = Field(default=None, ge=0)
    """The same bound for the oldest version behind a token's context. None: S."""
    on_stale: OnStale = OnStale.WAIT
    """`wait`: no step is taken that would over-age a group; `drop`: drop it; `requeue`: run it again."""
    max_attempts: int = Field(default=3, gt=0)
    """Attempts at an occurrence before it is given up."""
    min_graded: int | None = Field(default=None, gt=0)
    """Graded members a group needs. None: all of them."""
    publish_every: int = Field(default=1, gt=0)
    """Optimizer steps between publications."""

    @property
    def kv_bound(self) -> int:
        """The bound on KV age."""
        return self.max_staleness if self.max_kv_staleness is None else self.max_kv_staleness
