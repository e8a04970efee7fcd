"""A model that says what a script says: it stands in an engine's place where an agent shows how a task is solved.

The agent, its tools, the session and its server are those of a rollout, so what is left to imitate has exactly the
contexts that the policy will be asked in.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import final

import numpy as np

from fathom.core.errors import EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.records.sampling import FinishReason
from fathom.rollout.sampled import prompt_hash

_NAME = EngineId("script")
_VERSION = PolicyVersion(incarnation=1, number=0, digest="script")


@final
class ScriptedModel:
    """Answers by session key, in the order of its script, with log-probability 0."""

    def __init__(self) -> None:
        self._scripts: dict[str, Sequence[np.ndarray]] = {}
        self._said: dict[str, int] = {}

    def learn(self, session_key: str, answers: Sequence[np.ndarray]) -> None:
        """What to say in a session: int32 [A] for each turn, the token that ends it included."""
        self._scripts[session_key] = answers
        self._said[session_key] = 0

    def forget(self, session_key: str) -> int:
        """Turns of the script that nobody has asked for."""
        answers, said = self._scripts.pop(session_key, ()), self._said.pop(session_key, 0)
        return len(answers) - said

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk]:
        """See `Engine.generate`. Raises EngineRefusedError when the script is at its end, or the answer is too long."""
        turn, answers = self._said.get(request.session_key, 0), self._scripts.get(request.session_key, ())
        if turn >= len(answers):
            raise EngineRefusedError(_NAME, f"the script of {request.session_key} has only {len(answers)} answers")
        token_ids = answers[turn]
        if len(token_ids) > request.max_new_tokens:
            raise EngineRefusedError(
                _NAME, f"answer {turn + 1} of the script has {len(token_ids)} tokens, {request.max_new_tokens} fit"
            )
        self._said[request.session_key] = turn + 1
        zeros = np.zeros(len(token_ids), np.int32)
        yield GenerateChunk(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=zeros.astype(np.float32),
            policy_version=zeros,
            kv_version=zeros,
            versions=(_VERSION,),
            kept=None,
            raw_logprobs=None,
            routes=None,
            end=GenerateEnd(
                finish_reason=FinishReason.STOP,
                engine=_NAME,
                dtype="none",
                kernels="none",
                prompt_hash=prompt_hash(request.prompt_ids),
                cached_tokens=0,
                drafted_tokens=0,
                accepted_tokens=0,
                queue_s=0.0,
                generate_s=0.0,
            ),
        )
