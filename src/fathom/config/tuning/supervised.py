"""The root of supervised fine-tuning, `fathom sft`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fathom.config.families import Aggregation, Tracker
from fathom.config.lora import LoraConfig
from fathom.config.run import LedgerConfig
from fathom.config.section import Section
from fathom.config.trainer import CheckpointConfig
from fathom.config.tuning.sections import (
    DataConfig,
    TuningEvaluationConfig,
    TuningModelConfig,
    TuningTrainerConfig,
    check_lora,
)


class SupervisedObjectiveConfig(Section):
    """The loss: negative log-likelihood of the assistant's tokens."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number: a mean over all tokens of the step, or over conversations."""
    constant_length: int | None = Field(default=None, gt=0)
    """L of `seq_mean_token_sum_norm`; required by it and refused elsewhere."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM) != (self.constant_length is not None):
            raise ValueError("constant_length belongs to aggregation = 'seq_mean_token_sum_norm': set both or neither")
        return self


class SupervisedConfig(Section):
    """One run of supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    """What kind of run it is."""
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Its name; the run's folder is `runs_dir/name-...`."""
    runs_dir: str = Field(default="runs", pattern=r"^[^\x00]+$")
    """Where runs are kept."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random."""
    model: TuningModelConfig
    """The model."""
    data: DataConfig
    """Conversations to imitate."""
    trainer: TuningTrainerConfig
    """Training."""
    objective: SupervisedObjectiveConfig = SupervisedObjectiveConfig()
    """The loss."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole model. None: the whole model."""
    evaluation: TuningEvaluationConfig = TuningEvaluationConfig()
    """Loss on what is held out."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    ledger: LedgerConfig = LedgerConfig()
    """The history."""
    trackers: tuple[Tracker, ...] = ()
    """Where metrics go besides the ledger."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_lora(self.lora)
        return self
