"""How a token was chosen. Every number here changes the distribution that was really sampled from."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fathom.core.records.bias import LogitBias


class FinishReason(StrEnum):
    """Why a generation call ended."""

    STOP = "stop"
    """A stop id was sampled (it is the last sampled token)."""
    LENGTH = "length"
    """`max_new_tokens` were sampled."""
    CONTEXT = "context"
    """The engine's context is full."""
    ABORTED = "aborted"
    """The caller or the engine gave up; what was sampled until then is returned."""


class InFlightMode(StrEnum):
    """What a commit does with generations that are running."""

    CONTINUE = "continue"
    """Go on with the old KV and the new weights; `kv_version` says so."""
    RECOMPUTE = "recompute"
    """Prefill the context again under the new weights, then go on."""
    DRAIN = "drain"
    """Finish what runs under the old weights first; nothing new starts until the commit."""


class Purpose(StrEnum):
    """What a request is for; only rollouts are trained on."""

    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    PROBE = "probe"


class SamplingParams(msgspec.Struct, frozen=True, tag="sampling.1"):
    """The sampling distribution: (logits + bias) / temperature, then the kept set, then renormalised over it.

    The order of the transforms is fixed: logit_bias, temperature, top_k, top_p, min_p. A bias is in units of the
    model's own logits, as in the OpenAI API and in vLLM. The kept set is what survives all; behaviour
    log-probabilities are of the renormalised distribution (`algorithms.md`, C and pitfall 17).
    """

    temperature: float = 1.0
    """Divides the logits; > 0. Greedy decoding is not a distribution: refused for rollouts."""
    top_k: int = 0
    """Keep the k most likely tokens. 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass. 1.0: all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability. 0.0: all."""
    logit_bias: LogitBias | None = None
    """Added to the logits of some tokens before anything else. None: nothing is."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}; a distribution is needed to train on")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")

    @property
    def truncates(self) -> bool:
        """True when some tokens may be removed, so a kept set must be recorded."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
