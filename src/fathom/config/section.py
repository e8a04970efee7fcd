"""What every section of the config has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

DEVICE = r"^(cpu|cuda(:\d+)?)$"
"""How a torch device is written."""


class Section(BaseModel):
    """A frozen part of the config. Unknown keys are errors; each field has a sentence."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
