"""What both ways of tuning have in common: the root, data, trainer, evaluation."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fathom.config.families import Dtype, TooLong, Tracker
from fathom.config.lora import LoraConfig
from fathom.config.run import LedgerConfig
from fathom.config.section import DEVICE, Section
from fathom.config.trainer import CheckpointConfig, OptimizerConfig, TrainerConfig


class TuningModelConfig(Section):
    """The model to start from: a folder, or a tiny model made from the run's seed."""

    path: str | None = None
    """Hugging Face folder (model and tokenizer), or a hub id where a hub is reached. None: a tiny model."""
    tiny: str | None = Field(default=None, pattern="^(arithmetic|moe|terminal)$")
    """Name of a tiny model made from the seed, with its own tokenizer. None: `path` is used."""
    chat_template: bool | None = None
    """Render by the tokenizer's chat template. False: the messages' contents joined as plain text, answers ended by the
    eos. None: by the template where there is one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("set exactly one of path and tiny")
        return self


class DataConfig(Section):
    """Files of rows, JSONL or Parquet, and what of them is held out."""

    train: tuple[str, ...] = Field(min_length=1)
    """Files to train on."""
    held_out: str | None = None
    """File to evaluate on. None: `held_out_share` of the training rows, or nothing."""
    held_out_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training rows that is held out instead, drawn by the run's seed."""
    max_rows: int | None = Field(default=None, gt=0)
    """Read only the first rows of each file. None: all."""
    max_tokens: int | None = Field(default=None, gt=1)
    """Tokens of a sequence at most. None: what the model was made for."""
    too_long: TooLong = TooLong.REFUSE
    """What becomes of samples with a longer sequence."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.held_out is not None and self.held_out_share:
            raise ValueError("held_out and held_out_share both say what is held out; set one")
        return self


class TuningTrainerConfig(Section):
    """One training process."""

    epochs: int | None = Field(default=None, gt=0)
    """Passes over the samples, each once a pass. None: as many as `steps` need."""
    steps: int | None = Field(default=None, gt=0, lt=2**31)
    """Optimizer steps to take. None: what the epochs need."""
    tokens_per_step: int = Field(default=16384, gt=0)
    """Tokens of one optimizer step at most, context included; samples are never split, and one that is longer has a
    step of its own. The last step of an epoch may have fewer."""
    tokens_per_micro_batch: int = Field(default=4096, gt=0)
    """Packed tokens in one forward; a longer single sample is a micro-batch of its own. Never changes the result."""
    shuffle: bool = True
    """Take samples in a seeded order that differs from epoch to epoch. False: in the files' order."""
    dtype: Dtype = Dtype.FLOAT32
    """Element type of the forward and of the model that is written. Masters stay float32."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Torch device."""
    threads: int = Field(default=1, gt=0, le=1024)
    """CPU threads."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set exactly one of epochs and steps")
        return self

    def for_backend(self, steps: int) -> TrainerConfig:
        """As a backend takes it, for a run of `steps` steps."""
        return TrainerConfig(
            steps=steps,
            groups_per_step=1,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            optimizer=self.optimizer,
        )


class TuningEvaluationConfig(Section):
    """Evaluation on what is held out; always before the first step and after the last."""

    every_steps: int | None = Field(default=None, gt=0)
    """Steps between evaluations. None: only before and after."""


class TuningRoot(Section):
    """What every run that tunes is told, whatever its loss. Each way to tune has a root of its own, made of this."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Its name; the run's folder is `runs_dir/name-...`."""
    runs_dir: str = Field(default="runs", pattern=r"^[^\x00]+$")
    """Where runs are kept."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random."""
    model: TuningModelConfig
    """The model."""
    data: DataConfig
    """Rows to train on, and what of them is held out."""
    trainer: TuningTrainerConfig
    """Training."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole model. None: the whole model."""
    evaluation: TuningEvaluationConfig = TuningEvaluationConfig()
    """Scores of what is held out."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    ledger: LedgerConfig = LedgerConfig()
    """The history."""
    trackers: tuple[Tracker, ...] = ()
    """Where metrics go besides the ledger."""

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and "publish" in self.lora.model_fields_set:
            raise ValueError("lora.publish is for engines, and this run has none; remove it")
        return self
