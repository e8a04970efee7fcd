"""One generation under way: its tokens, and which version each of them is of."""

from __future__ import annotations

import time
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.rollout.engines.vllm.requests import kept_sets, looked_at
from fathom.rollout.engines.vllm.wire import Answer, Choice, SampledLogprob, Span

_REASONS = {"stop": FinishReason.STOP, "abort": FinishReason.ABORTED}


@final
class Generation:
    """Turns the server's events into chunks.

    Tokens are handed on at once while only one version can have made them. From the first commit on they are held
    until the end, when the server says which version made which.
    """

    def __init__(self, request: GenerateRequest, version: PolicyVersion, vocab_size: int, arrived_s: float) -> None:
        """`version` serves now; `arrived_s` is the monotonic time at which the request came."""
        self.request = request
        self.ended = False
        self._vocab_size = vocab_size
        self._arrived_s, self._sent_s = arrived_s, time.monotonic()
        self._versions = [version]
        self._floors = [version]
        self._handed_on = 0
        self._held: list[SampledLogprob] = []
        self._cached = 0
        self._rest: list[PolicyVersion] = []
        self._finish: FinishReason | None = None

    @property
    def started(self) -> bool:
        """Some of its tokens are known."""
        return self._handed_on > 0 or bool(self._held)

    def committed(self, version: PolicyVersion, mode: InFlightMode) -> None:
        """Another version is about to serve: what arrives from now on may be of either."""
        self._versions.append(version)
        if mode is InFlightMode.RECOMPUTE:
            self._floors.append(version)

    def abort(self) -> None:
        """It ends before it was sent."""
        self._finish, self.ended = FinishReason.ABORTED, True

    def take(self, event: Answer) -> GenerateChunk | None:
        """The tokens of an event, if they can be handed on. Raises ValueError when it contradicts itself."""
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self._cached = event.usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            self._held += _places(choice)
            if choice.finish_reason is not None:
                self._end(choice)
        if self.ended or len(self._versions) > 1 or not self._held:
            return None
        return self._chunk([self._versions[0]] * len(self._held), None)

    def last(self, engine: EngineId, dtype: str, kernels: str) -> GenerateChunk:
        """What is left, and how it ended. Raises ValueError when the server did not say so."""
        if self._finish is None:
            raise ValueError("the stream broke off before its end")
        now = time.monotonic()
        end = GenerateEnd(
            finish_reason=self._finish,
            engine=engine,
            dtype=dtype,
            kernels=kernels,
            prompt_hash=blake3(self.request.prompt_ids.tobytes()).hexdigest(),
            cached_tokens=self._cached,
            drafted_tokens=0,
            accepted_tokens=0,
            queue_s=self._sent_s - self._arrived_s,
            generate_s=now - self._sent_s,
        )
        return self._chunk(self._rest, end)

    def _end(self, choice: Choice) -> None:
        total = self._handed_on + len(self._held)
        versions = self._spelled_out(choice.weight_versions or (), total)
        if any(version != self._versions[0] for version in versions[: self._handed_on]):
            raise ValueError("tokens were handed on as of another version than the server says they are")
        self._rest = versions[self._handed_on :]
        self.ended = True
        if choice.finish_reason == "length":
            full = total == self.request.max_new_tokens
            self._finish = FinishReason.LENGTH if full else FinishReason.CONTEXT
        elif choice.finish_reason in _REASONS:
            self._finish = _REASONS[choice.finish_reason]
        else:
            raise ValueError(f"it ended by {choice.finish_reason!r}")

    def _spelled_out(self, spans: tuple[Span, ...], total: int) -> list[PolicyVersion]:
        """The version of every token."""
        known = {version.name: version for version in self._versions}
        spelled = [known[span.version] for span in spans if span.version in known for _ in range(span.start, span.end)]
        if len(spelled) != total or any(span.version not in known for span in spans):
            raise ValueError(f"{total} tokens, and their versions are {spans}")
        return spelled

    def _chunk(self, versions: list[PolicyVersion], end: GenerateEnd | None) -> GenerateChunk:
        places, self._held = self._held, []
        self._handed_on += len(places)
        logprobs = np.array([place.logprob for place in places], np.float32)
        if any(place.rank is None for place in places) or not np.all(np.isfinite(logprobs)):
            raise ValueError("a log-probability is no number: the weights have diverged")
        floors = [self._floor(version) for version in versions]
        asked = looked_at(self.request, self._vocab_size)
        return GenerateChunk(
            request_id=self.request.request_id,
            token_ids=np.array([place.token_id for place in places], np.int32),
            logprobs=logprobs,
            policy_version=np.array([version.number for version in versions], np.int32),
            kv_version=np.array([version.number for version in floors], np.int32),
            versions=tuple(dict.fromkeys([*floors, *versions])),
            kept=kept_sets(places, asked, self._vocab_size) if asked else None,
            raw_logprobs=None,
            routes=None,
            end=end,
        )

    def _floor(self, version: PolicyVersion) -> PolicyVersion:
        """The oldest version behind what a token of `version` read: everything since the last recomputation."""
        order = self._versions.index(version)
        return [floor for floor in self._floors if self._versions.index(floor) <= order][-1]


def _places(choice: Choice) -> tuple[SampledLogprob, ...]:
    places = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    if tuple(place.token_id for place in places) != (choice.token_ids or ()):
        raise ValueError("tokens and log-probabilities do not belong together")
    return places
