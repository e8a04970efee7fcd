"""Rollout: what is generated, and by which engine."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fathom.config.agent import AgentConfig
from fathom.config.families import Dtype, EngineKind, Speculation
from fathom.config.section import DEVICE, Section
from fathom.config.vllm import VllmConfig
from fathom.core.records.bias import LogitBias
from fathom.core.records.sampling import InFlightMode, SamplingParams


class SamplingConfig(Section):
    """The sampling distribution."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens. 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest most likely set with this mass. 1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens above this share of the most likely one's probability. 0: all."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids before the temperature divides them, each within [-100, 100]. Trained
    with: the trainer adds the same. Empty: none."""

    def params(self) -> SamplingParams:
        """The record form."""
        bias = LogitBias(*zip(*sorted(self.logit_bias.items()), strict=True)) if self.logit_bias else None
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, logit_bias=bias
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.params()
        return self


class RolloutConfig(Section):
    """How trajectories are made."""

    group_size: int = Field(default=8, gt=0, le=65536)
    """Trajectories per task."""
    max_in_flight: int = Field(default=64, gt=0, le=2**20)
    """Trajectories running at once."""
    max_new_tokens: int = Field(gt=0)
    """Sampled tokens per trajectory at most; where an agent asks, per answer."""
    max_prompt_tokens: int = Field(gt=0)
    """Tasks with longer prompts are left out, counted and named. Where an agent asks, no task is: a context may have so
    many tokens and `max_new_tokens`."""
    sampling: SamplingConfig = SamplingConfig()
    """The distribution."""
    stop_strings: tuple[Annotated[str, Field(pattern="^[^\ufffd]+$")], ...] = ()
    """Texts that end a generation: the token that completes one is the last and is trained like any other, and the
    grader's text ends before it. Special tokens are no text. Empty: none."""
    max_kept_ids: int = Field(default=1024, gt=0)
    """Largest kept set that may have to be recorded for one token; a larger possible one is refused at start."""
    in_flight: InFlightMode = InFlightMode.CONTINUE
    """What a weight update does with running generations. max_staleness = 0 implies `drain`."""
    record_routes: bool = False
    """Record which experts each token went to, in every layer; a rollout without them fails. Needs a model with
    experts, and an engine with the capability `routes`."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one generation."""
    agent: AgentConfig | None = None
    """Of tasks in which an agent acts only. None: the defaults."""


_OF_ITS_START = {"threads", "max_running", "step_tokens", "kv_memory_mb", "host", "port"}
_OF_SPECULATION = {"draft_tokens", "draft_model"}


class EngineConfig(Section):
    """The engines, all alike."""

    kind: EngineKind = EngineKind.EMBEDDED
    """Which one."""
    count: int = Field(default=1, gt=0, le=1024)
    """Engines started with the run. Others may join and leave while it runs."""
    dtype: Dtype | None = None
    """Element type of its weights. None: the trainer's, which is what the published cast is."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Torch device."""
    threads: int = Field(default=1, gt=0, le=1024)
    """CPU threads of each engine."""
    max_running: int = Field(default=64, gt=0, le=65536)
    """Sequences decoded in one batch of an engine."""
    step_tokens: int | None = Field(default=None, gt=1)
    """Tokens that an engine computes at once: those of sequences that decode, then pieces of prompts. More than
    `max_running`. None: 512, or twice `max_running` if that is more."""
    kv_memory_mb: int | None = Field(default=None, gt=0)
    """Memory of an engine for keys and values, in MiB. When it is full, the newest sequences wait and are computed
    again. None: what `max_running` longest sequences need, but at most 4 GiB unless one alone needs more."""
    speculation: Speculation = Speculation.NONE
    """Who drafts tokens that the model then checks, several in one forward. Changes speed alone: tokens and
    log-probabilities are the model's own. Of `kind = "embedded"` only."""
    draft_tokens: int = Field(default=4, gt=0, le=64)
    """Tokens drafted at once for a sequence, at most."""
    draft_model: str | None = None
    """Hugging Face folder of the model that drafts, of the same vocabulary. Of `speculation = "draft_model"` only."""
    host: str = "127.0.0.1"
    """Interface it listens on. Anything but loopback needs `token_env`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port it listens on. 0: any free one, which several engines need."""
    token_env: str | None = None
    """Name of the environment variable that holds the access token. None: a fresh random token (loopback only)."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for it to become healthy."""
    health_timeout_s: float = Field(default=10.0, gt=0)
    """An engine that serves and does not answer a look within this time is fenced and replaced."""
    vllm: VllmConfig | None = None
    """Of `kind = "vllm"` only. None: a server is started with the defaults."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.port and self.count > 1:
            raise ValueError(f"{self.count} engines cannot share port {self.port}: set port = 0, or count = 1")
        if self.step_tokens is not None and self.step_tokens <= self.max_running:
            raise ValueError(
                f"step_tokens = {self.step_tokens} leaves no room for prompts beside max_running = {self.max_running} "
                "sequences that decode: raise the one or lower the other"
            )
        if self.host not in ("127.0.0.1", "::1", "localhost") and self.token_env is None:
            raise ValueError(f"host {self.host!r} is reachable from outside: set token_env, or host = '127.0.0.1'")
        self._check_speculation()
        if self.kind is EngineKind.VLLM:
            self._check_vllm()
        elif self.vllm is not None:
            raise ValueError(f"[engine.vllm] is of kind = 'vllm', and kind = '{self.kind}'; remove it")
        return self

    def _check_speculation(self) -> None:
        if self.speculation is not Speculation.NONE and self.kind is not EngineKind.EMBEDDED:
            raise ValueError(f"speculation is of kind = 'embedded', not '{self.kind}': set speculation = 'none'")
        if self.speculation is Speculation.NONE and (unused := self.model_fields_set & _OF_SPECULATION):
            raise ValueError(f"without speculation nothing is drafted: remove {', '.join(sorted(unused))}")
        if (self.draft_model is not None) != (self.speculation is Speculation.DRAFT_MODEL):
            raise ValueError("draft_model goes with speculation = 'draft_model': set both or neither")

    def _check_vllm(self) -> None:
        if self.device != "cpu":
            raise ValueError(f"kind = 'vllm' computes on 'cpu' only, not on '{self.device}'")
        if self.vllm is None or self.vllm.url is None:
            return
        if self.count > 1:
            raise ValueError("vllm.url names one server: set count = 1")
        if given := self.model_fields_set & _OF_ITS_START:
            raise ValueError(
                f"with vllm.url the server is started elsewhere: remove {', '.join(sorted(given))}, or vllm.url"
            )
