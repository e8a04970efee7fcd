"""One trajectory's conversations: calls in, answers out, and the token tree that they leave.

    call ── known prefix? ──> its context, extended by what is new  ──┐
            │ no, or the template forbids: rendered as a whole       ──┴─> engine ──> ids ──> answer, turn in the tree

Sampled ids are never decoded and encoded again: a context is what was sent and sampled before, and what was rendered
since. What the engine says it executed is compared with it, at every turn and once more when the session is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.errors import EngineError, NotAppendableError, RecordError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateRequest
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.core.records.trajectory import TokenPayload, TrajectoryStatus
from fathom.rollout.sampled import Sampled, sampled_from
from fathom.rollout.session.call import Heard, Reader, Reads, Renderer, TurnCall, TurnEnded
from fathom.rollout.session.matching import Match, Prefixes, Strictness
from fathom.rollout.session.tree import SampledTurn, TokenTree

Generate = Callable[[GenerateRequest], AsyncIterator[GenerateChunk]]

_STATUS = {
    FinishReason.STOP: TrajectoryStatus.COMPLETED,
    FinishReason.LENGTH: TrajectoryStatus.TRUNCATED,
    FinishReason.CONTEXT: TrajectoryStatus.TRUNCATED,
    FinishReason.ABORTED: TrajectoryStatus.ABORTED,
}


class CallRefusedError(Exception):
    """The call cannot be answered as asked; the session is as before. `kind` is for the dialects."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """What a session is for, and what it may use."""

    name: str
    """Identity: the trajectory's."""
    sampling: SamplingParams
    """The distribution of calls that name none."""
    max_new_tokens: int
    """Sampled tokens of one turn at most."""
    max_context_tokens: int
    """Tokens of a context at most, what is sampled included."""
    max_turns: int
    """Turns at most."""
    stop_ids: tuple[int, ...]
    """Ids that end a turn."""
    seed: int
    """Fixes its random numbers, by turn."""
    priority: int
    """Smaller is served first."""
    purpose: Purpose
    """Rollout or evaluation."""
    pinned: PolicyVersion | None = None
    """Answer by exactly this version. None: whichever serves."""
    want_routes: bool = False
    """Record expert routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What a session leaves."""

    payload: TokenPayload | None
    """Its tokens. None: nothing was asked of the model."""
    status: TrajectoryStatus
    """How it ended, by the finish reason of the last turn and what was refused since."""
    cause: str
    """Why it was not completed. Empty: it was."""
    matched: dict[Strictness, int]
    """Calls that went on from a known history, by how that was found."""
    rendered_whole: int
    """Calls whose context had to be rendered as a whole though their history was known."""
    messages: tuple[Message, ...]
    """The conversation that ended last."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prompt:
    """What is sent beyond the context of a turn. In the tree once it was answered."""

    parent: int | None
    token_ids: np.ndarray
    messages: tuple[Message, ...]


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """An answer on its way, for whoever hears it: also for a caller that comes back after it lost the line."""

    call: TurnCall
    heard: list[Heard] = field(default_factory=list)
    failure: Exception | None = None
    ended: bool = False
    told: bool = False
    listeners: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_lost(self) -> bool:
        """Nobody has heard it to its end, and nobody listens."""
        return not self.told and not self.listeners

    def tell(self, *heard: Heard) -> None:
        self.heard += heard
        self._wake()

    def end(self, failure: Exception | None = None) -> None:
        self.failure, self.ended = failure, True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


@final
class Session:
    """Answers calls, several at once if asked so. Used in one event loop."""

    def __init__(self, plan: SessionPlan, generate: Generate, renderer: Renderer, reads: Reads) -> None:
        """Nothing is asked yet."""
        self.plan = plan
        self._generate = generate
        self._renderer = renderer
        self._reads = reads
        self._tree = TokenTree()
        self._prefixes = Prefixes()
        self._answers: list[_Answer] = []
        self._retries: dict[str, _Answer] = {}
        self._matched: Counter[Strictness] = Counter()
        self._rendered_whole = 0
        self._started = 0
        self._trouble: tuple[TrajectoryStatus, str] | None = None
        self._closed = False

    @property
    def tokens(self) -> int:
        """Tokens that it keeps, each once."""
        return sum(map(len, (self._tree.own_tokens(place) for place in range(len(self._tree)))))

    async def answer(self, call: TurnCall) -> AsyncIterator[Heard]:
        """Stream the answer to a call; the last that is heard is a `TurnEnded`.

        A call that is sent again, by its `retry` or because its answer was never heard to the end, is not sampled
        again: whoever asks hears the same answer from its beginning. A caller that goes away does not end it.

        Raises:
            CallRefusedError: it cannot be answered as asked.
            EngineError: the engine failed; the call may be repeated.
        """
        answer = self._find(call) or self._begin(call)
        position = 0
        answer.listeners += 1
        try:
            while True:
                news = answer.news
                while position < len(answer.heard):
                    yield answer.heard[position]
                    position += 1
                if answer.ended:
                    break
                await news.wait()
        finally:
            answer.listeners -= 1
        answer.told = True
        if answer.failure is not None:
            raise answer.failure

    async def close(self) -> Closed:
        """End what runs, and hand over the record. Later calls are refused.

        Raises:
            RecordError: a trained token would have another left context than the engine was sent.
        """
        self._closed = True
        running = [answer.task for answer in self._answers if answer.task is not None and not answer.ended]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        payload = self._tree.payload() if len(self._tree) else None
        if payload is not None:
            _check_contexts(payload)
        status, cause = self._how_it_ended(interrupted=bool(running))
        end = self._tree.end
        return Closed(
            payload=payload,
            status=status,
            cause=cause,
            matched=dict(self._matched),
            rendered_whole=self._rendered_whole,
            messages=() if end is None else self._tree.messages(end),
        )

    # One call -------------------------------------------------------------------------------------------------------

    def _find(self, call: TurnCall) -> _Answer | None:
        """The answer to this very call, sent before."""
        if call.retry and (known := self._retries.get(call.retry)) is not None:
            return known
        return next((each for each in self._answers if each.is_lost and each.call == call), None)

    def _begin(self, call: TurnCall) -> _Answer:
        if self._closed:
            raise CallRefusedError("session_ended", f"session {self.plan.name} has ended; nothing is sampled for it")
        if self._started == self.plan.max_turns:
            self._trouble = (TrajectoryStatus.TRUNCATED, "max_turns")
            raise CallRefusedError("too_many_turns", f"the session has had its {self.plan.max_turns} turns")
        prompt = self._prompt(call)
        context = self._context(prompt)
        room = self.plan.max_context_tokens - len(context)
        if room < 1:
            self._trouble = (TrajectoryStatus.TRUNCATED, FinishReason.CONTEXT.value)
            raise CallRefusedError(
                "context_length_exceeded",
                f"the conversation has {len(context)} tokens; with an answer at most "
                f"{self.plan.max_context_tokens} are served",
            )
        limit = min(self.plan.max_new_tokens, room, call.max_new_tokens or self.plan.max_new_tokens)
        answer = _Answer(call=call)
        self._answers = [each for each in self._answers if not (each.ended and each.told)]
        self._answers.append(answer)
        if call.retry:
            self._retries[call.retry] = answer
        number, self._started = self._started, self._started + 1
        answer.task = asyncio.create_task(self._sample(answer, prompt, context, number, limit))
        return answer

    def _prompt(self, call: TurnCall) -> _Prompt:
        match = self._prefixes.find(call.messages, call.tools)
        prompt = self._go_on(call, match) if match is not None else None
        if prompt is not None:
            return prompt
        token_ids = self._renderer.render(call.messages, call.tools)
        return _Prompt(parent=None, token_ids=token_ids, messages=call.messages)

    def _go_on(self, call: TurnCall, match: Match) -> _Prompt | None:
        """A prompt behind a known turn. None: the context has to be rendered as a whole."""
        new = call.messages[match.messages :]
        turn = self._tree[match.place]
        assert isinstance(turn, SampledTurn), "only histories that end in a turn are remembered"
        if not new or any(message.role is Role.ASSISTANT for message in new):
            return None  # the agent put words into the model's mouth
        self._matched[match.strictness] += 1
        self._tree.extend(match.place)
        sampled = turn.sampled.token_ids
        last = int(sampled[-1]) if len(sampled) else None
        try:
            token_ids = self._renderer.extend(call.messages[: match.messages], new, call.tools, last)
        except NotAppendableError:
            self._rendered_whole += 1
            return None
        return _Prompt(parent=match.place, token_ids=token_ids, messages=new)

    def _context(self, prompt: _Prompt) -> np.ndarray:
        """int32 [P]: all that the engine is sent."""
        if prompt.parent is None:
            return prompt.token_ids
        return np.concatenate([self._tree.context(prompt.parent), prompt.token_ids], dtype=np.int32)

    async def _sample(self, answer: _Answer, prompt: _Prompt, context: np.ndarray, number: int, limit: int) -> None:
        """Generate, tell, remember. Whatever goes wrong is told to whoever hears the answer."""
        call = answer.call
        sampling = call.sampling or self.plan.sampling
        reader = self._reads.reader(call.tools, call.stop_strings)
        try:
            chunks = await self._stream(answer, reader, self._request(context, sampling, number, limit, call))
            routed = self._tree.routed(prompt.parent)
            sampled = sampled_from(context, chunks, sampling, routes=self.plan.want_routes, routed=routed)
        except asyncio.CancelledError:
            answer.end(CallRefusedError("session_ended", "the session was closed"))
            raise
        except (EngineError, RecordError) as error:
            self._trouble = (TrajectoryStatus.FAILED, f"engine_error: {error}")
            answer.end(error)
            return
        held_back, message = reader.end(sampled.end.finish_reason)
        asked = self._tree.add_prompt(prompt.parent, prompt.token_ids, prompt.messages)
        place = self._tree.add_turn(asked, sampled, message)
        self._prefixes.remember((*call.messages, message), call.tools, place)
        self._trouble = None
        answer.tell(*held_back, _ended(message, sampled, len(context)))
        answer.end()

    async def _stream(self, answer: _Answer, reader: Reader, request: GenerateRequest) -> list[GenerateChunk]:
        chunks: list[GenerateChunk] = []
        async with aclosing(self._generate(request)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                answer.tell(*reader.feed(chunk.token_ids.tolist()))
        return chunks

    def _request(
        self, context: np.ndarray, sampling: SamplingParams, number: int, limit: int, call: TurnCall
    ) -> GenerateRequest:
        plan = self.plan
        return GenerateRequest(
            request_id=f"{plan.name}/t{number}",
            prompt_ids=context,
            sampling=sampling,
            seed=_turn_seed(plan.seed, number),
            max_new_tokens=limit,
            stop_ids=plan.stop_ids,
            stop_strings=call.stop_strings,
            priority=plan.priority,
            session_key=plan.name,
            purpose=plan.purpose,
            pinned=plan.pinned,
            want_routes=plan.want_routes,
        )

    def _how_it_ended(self, *, interrupted: bool) -> tuple[TrajectoryStatus, str]:
        if interrupted:
            return TrajectoryStatus.ABORTED, "closed while it generated"
        if self._trouble is not None:
            return self._trouble
        end = self._tree.end
        if end is None:
            return TrajectoryStatus.FAILED, "nothing was asked of the model"
        turn = self._tree[end]
        assert isinstance(turn, SampledTurn), "the end is a turn"
        reason = turn.sampled.end.finish_reason
        return _STATUS[reason], "" if reason is FinishReason.STOP else reason.value


def _ended(message: Message, sampled: Sampled, prompt_tokens: int) -> TurnEnded:
    return TurnEnded(
        message=message,
        finish_reason=sampled.end.finish_reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=sampled.end.cached_tokens,
        sampled_tokens=len(sampled.token_ids),
    )


def _turn_seed(seed: int, number: int) -> int:
    """64 bits, another for each turn."""
    return int.from_bytes(blake3(seed.to_bytes(8, "little") + number.to_bytes(4, "little")).digest(length=8), "little")


def _check_contexts(payload: TokenPayload) -> None:
    """The contract: whatever is trained has exactly the left context that the engine says it was sent."""
    for index, branch in enumerate(payload.branches):
        running, done = blake3(), 0
        for turn in branch.turns:
            running.update(branch.token_ids[done : turn.start].tobytes())
            done = turn.start
            if running.hexdigest() != turn.prompt_hash:
                raise RecordError(f"the turn at {turn.start} of branch {index} was sampled in another context")
