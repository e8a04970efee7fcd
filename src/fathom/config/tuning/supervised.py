"""The root of supervised fine-tuning, `fathom sft`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fathom.config.families import Aggregation
from fathom.config.section import Section
from fathom.config.tuning.sections import TuningRoot


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


class SupervisedConfig(TuningRoot):
    """One run of supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    """What kind of run it is."""
    objective: SupervisedObjectiveConfig = SupervisedObjectiveConfig()
    """The loss."""
