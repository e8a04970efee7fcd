"""The root of preference training, `fathom dpo`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fathom.config.families import TooLong
from fathom.config.section import Section
from fathom.config.trainer import WarmStartConfig
from fathom.config.tuning.sections import TuningRoot


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


class PreferenceConfig(TuningRoot):
    """One run of preference training."""

    kind: Literal["dpo"] = "dpo"
    """What kind of run it is."""
    objective: PreferenceObjectiveConfig = PreferenceObjectiveConfig()
    """The loss."""
    warm_start: WarmStartConfig | None = None
    """Imitate the chosen answers of some pairs first; `tasks` says of how many. The reference is frozen after it. None:
    the model as given is the reference."""

    @model_validator(mode="after")
    def _check_cuts(self) -> Self:
        if self.data.too_long is TooLong.TRUNCATE:
            raise ValueError(
                "data.too_long = 'truncate' would compare answers by where they were cut; set 'leave_out', or raise "
                "data.max_tokens"
            )
        return self
