"""The reference of the decoder: one request at a time, every token by a forward of its whole context.

No cache, no batch, no chunks; the same sampler and the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from torch import Tensor

from fathom.core.ports.engine import GenerateRequest
from fathom.rollout.engines.embedded.server.decode.sampler import Draw, draw
from fathom.rollout.engines.uniforms import uniforms

ContextLogits = Callable[[np.ndarray], Tensor]
"""float32 [1, V] after a whole int32 context."""


@final
class PlainLoop:
    """Generates, and follows what another loop generated."""

    def __init__(self, logits: ContextLogits) -> None:
        self._logits = logits

    def generate(self, request: GenerateRequest, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 ids and float32 log-probabilities of `tokens` tokens, whatever would end the request."""
        context, logprobs = request.prompt_ids, np.empty(tokens, np.float32)
        for index in range(tokens):
            drawn = self._draw(request, self._logits(context), len(context), 0.0)
            context = np.append(context, drawn.token_ids.astype(np.int32))
            logprobs[index] = drawn.logprobs[0]
        return context[len(request.prompt_ids) :], logprobs

    def logprob(self, request: GenerateRequest, context: np.ndarray, token: int, slack: float) -> float:
        """Log-probability of the token that another loop drew after `context`. NaN: this loop would not draw it.

        Two loops whose logits differ in the last bits may draw two tokens where a uniform lies on the edge between
        them: a token is right if the loop draws it with a uniform at most `slack` away.
        """
        logits = self._logits(context)
        for moved in (0.0, -slack, slack):
            drawn = self._draw(request, logits, len(context), moved)
            if drawn.token_ids[0] == token:
                return float(drawn.logprobs[0])
        return float("nan")

    def _draw(self, request: GenerateRequest, logits: Tensor, position: int, moved: float) -> Draw:
        uniform = uniforms(np.array([request.seed], np.uint64), np.array([position]))
        return draw(logits, [request.sampling], np.clip(uniform + moved, 0.0, np.nextafter(1.0, 0.0)), raw=False)
