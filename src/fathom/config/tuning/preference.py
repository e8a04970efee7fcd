"""The root of preference training, `fathom dpo`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fathom.config.families import TooLong, Tracker
from fathom.config.lora import LoraConfig
from fathom.config.run import LedgerConfig
from fathom.config.section import Section
from fathom.config.trainer import CheckpointConfig, WarmStartConfig
from fathom.config.tuning.sections import (
    DataConfig,
    TuningEvaluationConfig,
    TuningModelConfig,
    TuningTrainerConfig,
    check_lora,
)


class PreferenceObjectiveConfig(Section):
    """DPO (arXiv 2305.18290): the chosen answer becomes likelier than the rejected one, as measured by the frozen model
    that the run starts from."""

    beta: float = Field(default=0.1, gt=0)
    """How little the policy may move: rewards are beta times log-ratios to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair is labelled the wrong way round (conservative DPO)."""
    length_normalised: bool = False
    """Compare log-probabilities per token instead of sums, so that long answers have no advantage."""
    imitation: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's mean negative log-likelihood beside it (arXiv 2404.19733)."""


class PreferenceConfig(Section):
    """One run of preference training."""

    kind: Literal["dpo"] = "dpo"
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
    """Pairs of answers."""
    trainer: TuningTrainerConfig
    """Training."""
    objective: PreferenceObjectiveConfig = PreferenceObjectiveConfig()
    """The loss."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole model. None: the whole model."""
    warm_start: WarmStartConfig | None = None
    """Imitate the chosen answers of some pairs first; `tasks` says of how many. The reference is frozen after it. None:
    the model as given is the reference."""
    evaluation: TuningEvaluationConfig = TuningEvaluationConfig()
    """Accuracy on what is held out."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    ledger: LedgerConfig = LedgerConfig()
    """The history."""
    trackers: tuple[Tracker, ...] = ()
    """Where metrics go besides the ledger."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_lora(self.lora)
        if self.data.too_long is TooLong.TRUNCATE:
            raise ValueError(
                "data.too_long = 'truncate' would compare answers by where they were cut; set 'leave_out', or raise "
                "data.max_tokens"
            )
        return self
