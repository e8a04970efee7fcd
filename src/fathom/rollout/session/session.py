"""One trajectory's conversations: calls in, answers out, and the token tree that they leave.

    call ── known prefix? ──> its context, extended by what is new  ──┐
            │ no, or the template forbids: rendered as a whole       ──┴─> engine ──> ids ──> answer, turn in the tree

Sampled ids are never decoded and encoded again: a context is what was sent and sampled before, and what was rendered
since. What the engine says it executed is compared with it, at every turn and once more when the session is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import final

import msgspec
import numpy as np
from blake3 import blake3

from fathom.core.errors import ConfigError, DataError, EngineError, NotAppendableError, RecordError
from fathom.core.ports.engine import GenerateChunk, GenerateRequest
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import TokenPayload, TrajectoryStatus
from fathom.rollout.sampled import Sampled, sampled_from
from fathom.rollout.session.answers import Answer, Answers
from fathom.rollout.session.call import (
    CallRefusedError,
    Heard,
    Reader,
    Reads,
    Refusal,
    Renderer,
    TurnBegan,
    TurnCall,
    TurnEnded,
)
from fathom.rollout.session.dialects.history import History
from fathom.rollout.session.matching import Match, Prefixes, Strictness
from fathom.rollout.session.meter import Meter
from fathom.rollout.session.plan import Closed, SessionPlan
from fathom.rollout.session.tree import SampledTurn, TokenTree

Generate = Callable[[GenerateRequest], AsyncIterator[GenerateChunk]]

SILENT_SHARE = 0.1
"""Part of the time since the session's first call. An engine that was silent for longer, while the agent waited for it
to the end, is why the agent did not come further."""

_STATUS = {
    FinishReason.STOP: TrajectoryStatus.COMPLETED,
    FinishReason.LENGTH: TrajectoryStatus.TRUNCATED,
    FinishReason.CONTEXT: TrajectoryStatus.TRUNCATED,
    FinishReason.ABORTED: TrajectoryStatus.ABORTED,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prompt:
    """What is sent beyond the context of a turn. In the tree once it was answered."""

    parent: int | None
    token_ids: np.ndarray
    messages: tuple[Message, ...]
    context: np.ndarray
    match: Match | None


@final
class Session:
    """Answers calls, several at once if asked so. Used in one event loop."""

    def __init__(
        self,
        plan: SessionPlan,
        generate: Generate,
        renderer: Renderer,
        reads: Reads,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked yet. `meter` counts the turns of many sessions; `clock` gives seconds."""
        self.plan = plan
        self._generate = generate
        self._renderer = renderer
        self._reads = reads
        self._meter = meter or Meter(clock)
        self._clock = clock
        self._tree = TokenTree()
        self._prefixes = Prefixes()
        self.history = History(self._prefixes.settled)
        """What of a request's history need not be read again."""
        self._answers = Answers()
        self._matched: Counter[Strictness] = Counter()
        self._rendered_whole = 0
        self._started = 0
        self._thinks = False
        self._turns = 0
        self._sampled_tokens = 0
        self._used_s = clock()
        self._first_s: float | None = None
        self._trouble: tuple[TrajectoryStatus, str] | None = None
        self._closed: Closed | None = None
        self._closing = False

    @property
    def tokens(self) -> int:
        """Tokens that it keeps, each once."""
        return self._tree.tokens

    @property
    def idle_s(self) -> float:
        """Seconds since a turn was asked for or ended. 0 while one runs."""
        return 0.0 if self._answers.running else self._clock() - self._used_s

    async def answer(self, call: TurnCall) -> AsyncIterator[Heard]:
        """Stream the answer to a call; the first that is heard is a `TurnBegan`, the last a `TurnEnded`.

        A call that is sent again, by its `retry` or because its answer was never heard to the end, is not sampled
        again: whoever asks hears the same answer from its beginning. A caller that goes away does not end it. An answer
        counts as heard once the iterator is asked for more after the `TurnEnded`.

        Raises:
            CallRefusedError: it cannot be answered as asked.
            EngineError: the engine failed; the call may be repeated.
            RecordError: the engine's answer contradicts itself.
        """
        call = replace(call, messages=self._prefixes.settled(call.messages, call.tools))
        key = self._key(call)
        answer = self._answers.find(call, key) or self._begin(call, key)
        async with aclosing(answer.listen()) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield part

    async def close(self, given_up: str = "") -> Closed:
        """End what runs, and hand over the record. Later calls are refused. Closed twice, it is the same record.

        A session is failed, not aborted, when an answer was still to come and that was the engine's doing: it had said
        nothing of it for more than `SILENT_SHARE` of the time since the first call (`engine_silent`), or had failed
        before and was asked again.

        Args:
            given_up: why the trajectory is aborted whatever it did. Empty: it ended by itself.

        Raises:
            RecordError: a trained token would have another left context than the engine was sent.
        """
        self._closing = True
        running = self._answers.running
        silence = self._silence(running)
        tasks = [answer.task for answer in running if answer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._closed is None:
            has_failed = self._trouble is not None and self._trouble[0] is TrajectoryStatus.FAILED
            if silence and not has_failed:
                self._trouble, has_failed = (TrajectoryStatus.FAILED, silence), True
            if running and not has_failed:
                given_up = given_up or "closed while it generated"
            self._closed = self._record(given_up)
        return self._closed

    # One call -------------------------------------------------------------------------------------------------------

    def _key(self, call: TurnCall) -> bytes:
        """Equal for equal calls."""
        rest = msgspec.json.encode((call.max_new_tokens, call.sampling, call.stop_strings))
        return blake3(self._prefixes.identity(call.messages, call.tools) + rest).digest()

    def _begin(self, call: TurnCall, key: bytes) -> Answer:
        self._used_s = self._clock()
        self._first_s = self._used_s if self._first_s is None else self._first_s
        self._check_allowed(call)
        try:
            prompt = self._prompt(call)
            reader = self._reads.reader(call.tools, call.stop_strings, self._request_id)
        except ConfigError as error:  # of the template or the tokenizer: about this conversation
            raise CallRefusedError(Refusal.INVALID, str(error), "messages") from error
        except Exception as error:
            self._trouble = (TrajectoryStatus.FAILED, f"render_error: {error!r}")
            raise CallRefusedError(Refusal.INTERNAL, f"the conversation could not be rendered: {error!r}") from error
        limit = self._limit(call, prompt)
        if prompt.match is not None:
            self._matched[prompt.match.strictness] += 1
            self._rendered_whole += prompt.parent is None
        answer = Answer(key, self._used_s)
        self._answers.add(answer, call.retry)
        answer.tell(TurnBegan(prompt_tokens=len(prompt.context)))
        request = self._request(prompt.context, call, limit)
        self._started += 1
        self._meter.begin()
        answer.task = asyncio.create_task(self._sample(answer, call, prompt, request, reader))
        answer.task.add_done_callback(lambda task: self._after(answer, task))
        return answer

    def _check_allowed(self, call: TurnCall) -> None:
        if self._closing:
            raise CallRefusedError(Refusal.ENDED, f"session {self.plan.name} has ended; nothing is sampled for it")
        if not call.messages:
            raise CallRefusedError(Refusal.INVALID, "a conversation has at least one message", "messages")
        if call.messages[-1].role is Role.ASSISTANT:
            raise CallRefusedError(
                Refusal.INVALID,
                "the last message is the assistant's; an answer that goes on with given words is not sampled: end with "
                "a message of the user or a tool",
                "messages",
            )
        if call.max_new_tokens is not None and call.max_new_tokens < 1:
            raise CallRefusedError(Refusal.INVALID, "at least one token must be allowed", "max_tokens")
        running = self._answers.running
        if self._turns + len(running) >= self.plan.max_turns:
            self._trouble = (TrajectoryStatus.TRUNCATED, "max_turns")
            raise CallRefusedError(Refusal.NO_TURNS_LEFT, f"the session has had its {self.plan.max_turns} turns")
        if self._tokens_left < 1:
            self._trouble = (TrajectoryStatus.TRUNCATED, "max_sampled_tokens")
            raise CallRefusedError(
                Refusal.NO_TOKENS_LEFT, f"the session has sampled its {self.plan.max_sampled_tokens} tokens"
            )

    @property
    def _tokens_left(self) -> int:
        """Tokens that may be sampled yet."""
        if self.plan.max_sampled_tokens is None:
            return self.plan.max_new_tokens
        running = sum(answer.sampled_tokens for answer in self._answers.running)
        return self.plan.max_sampled_tokens - self._sampled_tokens - running

    def _limit(self, call: TurnCall, prompt: _Prompt) -> int:
        """Tokens that may be sampled as the answer. Refused or not, the turn gone on from was not abandoned."""
        room = self.plan.max_context_tokens - len(prompt.context)
        if prompt.match is not None:
            self._tree.extend(prompt.match.place)
        if room < 1:
            self._trouble = (TrajectoryStatus.TRUNCATED, FinishReason.CONTEXT.value)
            raise CallRefusedError(
                Refusal.CONTEXT_FULL,
                f"the conversation has {len(prompt.context)} tokens; this model's maximum context length is "
                f"{self.plan.max_context_tokens} tokens, with the answer: shorten the messages",
                "messages",
            )
        return min(self.plan.max_new_tokens, room, self._tokens_left, call.max_new_tokens or room)

    def _prompt(self, call: TurnCall) -> _Prompt:
        match = self._prefixes.find(call.messages, call.tools)
        if match is not None and any(each.role is Role.ASSISTANT for each in call.messages[match.messages :]):
            match = None  # the agent put words into the model's mouth
        if match is not None and (prompt := self._go_on(call, match)) is not None:
            return prompt
        token_ids = _ids(self._renderer.render(call.messages, call.tools))
        if not len(token_ids):
            raise DataError("the conversation is empty; a model needs at least one token to go on from")
        return _Prompt(parent=None, token_ids=token_ids, messages=call.messages, context=token_ids, match=match)

    def _go_on(self, call: TurnCall, match: Match) -> _Prompt | None:
        """A prompt behind a known turn. None: by the template the context has to be rendered as a whole."""
        turn = self._tree[match.place]
        assert isinstance(turn, SampledTurn), "only histories that end in a turn are remembered"
        sampled, new = turn.sampled.token_ids, call.messages[match.messages :]
        last = int(sampled[-1]) if len(sampled) else None
        before = self._with_thoughts(call.messages[: match.messages], match.place)
        try:
            token_ids = _ids(self._renderer.extend(before, new, call.tools, last))
        except NotAppendableError:
            return None
        context = np.concatenate([self._tree.context(match.place), token_ids], dtype=np.int32)
        return _Prompt(parent=match.place, token_ids=token_ids, messages=new, context=context, match=match)

    def _with_thoughts(self, given: tuple[Message, ...], place: int) -> tuple[Message, ...]:
        """A known history with what was thought: agents may leave it out, and it stands in the context all the same."""
        known = self._tree.messages(place) if self._thinks else ()
        if len(known) != len(given):
            return given
        return tuple(
            one if one.reasoning == other.reasoning else msgspec.structs.replace(one, reasoning=other.reasoning)
            for one, other in zip(given, known, strict=True)
        )

    @property
    def _request_id(self) -> str:
        """Of the next turn."""
        return f"{self.plan.name}/t{self._started}"

    def _request(self, context: np.ndarray, call: TurnCall, limit: int) -> GenerateRequest:
        plan = self.plan
        return GenerateRequest(
            request_id=self._request_id,
            prompt_ids=context,
            sampling=call.sampling or plan.sampling,
            seed=_turn_seed(plan.seed, self._started),
            max_new_tokens=limit,
            stop_ids=plan.stop_ids,
            stop_strings=call.stop_strings,
            priority=plan.priority,
            session_key=plan.name,
            purpose=plan.purpose,
            pinned=plan.pinned,
            want_routes=plan.want_routes,
        )

    async def _sample(
        self, answer: Answer, call: TurnCall, prompt: _Prompt, request: GenerateRequest, reader: Reader
    ) -> None:
        """Generate, tell, remember. Whatever goes wrong is told to whoever hears the answer."""
        try:
            chunks = await self._stream(answer, reader, request)
            routed = self._tree.routed(prompt.parent) if request.want_routes else 0
            sampled = sampled_from(prompt.context, chunks, request.sampling, routes=request.want_routes, routed=routed)
            held_back, message = reader.end(sampled.end.finish_reason)
        except (EngineError, RecordError) as error:
            self._fail(answer, "engine_error", error)
            return
        except Exception as error:  # noqa: BLE001 - the boundary: a caller waits for it
            broken = CallRefusedError(Refusal.INTERNAL, f"the answer could not be read: {error!r}")
            broken.__cause__ = error
            self._fail(answer, "read_error", broken)
            return
        asked = self._tree.add_prompt(prompt.parent, prompt.token_ids, prompt.messages)
        place = self._tree.add_turn(asked, sampled, message)
        self._prefixes.remember((*call.messages, message), call.tools, place)
        self._trouble = None
        self._thinks = self._thinks or bool(message.reasoning)
        self._turns += 1
        self._sampled_tokens += len(sampled.token_ids)
        ended = _ended(message, sampled, request)
        answer.tell(*held_back, ended)
        answer.end()
        self._meter.end(ended)

    async def _stream(self, answer: Answer, reader: Reader, request: GenerateRequest) -> list[GenerateChunk]:
        chunks: list[GenerateChunk] = []
        async with aclosing(self._generate(request)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunk.token_ids):
                    answer.news_s = self._clock()
                answer.sampled_tokens += len(chunk.token_ids)
                answer.tell(*reader.feed(chunk.token_ids.tolist()))
        return chunks

    def _fail(self, answer: Answer, cause: str, error: Exception) -> None:
        self._trouble = (TrajectoryStatus.FAILED, f"{cause}: {error}")
        self._answers.forget(answer)
        answer.end(error)
        self._meter.end(None)

    def _after(self, answer: Answer, task: asyncio.Task[None]) -> None:
        """Its task is over. An answer that has no end yet was cancelled, perhaps before it began, or not remembered."""
        self._used_s = self._clock()
        if answer.ended:
            return
        if task.cancelled():
            self._answers.forget(answer)
            answer.end(CallRefusedError(Refusal.ENDED, f"session {self.plan.name} was closed"))
            self._meter.end(None)
        else:
            error = CallRefusedError(Refusal.INTERNAL, f"the answer could not be kept: {task.exception()!r}")
            self._fail(answer, "record_error", error)

    # The end --------------------------------------------------------------------------------------------------------

    def _silence(self, running: Sequence[Answer]) -> str:
        """Why the engine is to blame for the end of a session that waited for these answers. Empty: it is not."""
        if self._first_s is None or not running or not self._turns:  # without any turn there is nothing to be graded
            return ""
        now_s = self._clock()
        silent_s, since_s = now_s - min(answer.news_s for answer in running), now_s - self._first_s
        if silent_s <= SILENT_SHARE * since_s:
            return ""
        return f"engine_silent: not a token of an answer in the last {silent_s:.3g} s of {since_s:.3g} s"

    def _record(self, given_up: str) -> Closed:
        payload = self._tree.payload() if len(self._tree) else None
        if payload is not None:
            _check_contexts(payload)
        turns = [turn for place in self._tree.turns if isinstance(turn := self._tree[place], SampledTurn)]
        reasons = tuple(turn.sampled.end.finish_reason for turn in turns)
        status, cause = (TrajectoryStatus.ABORTED, given_up) if given_up else self._how_it_ended(reasons)
        end = self._tree.end
        return Closed(
            payload=payload,
            status=status,
            cause=cause,
            matched=dict(self._matched),
            rendered_whole=self._rendered_whole,
            messages=() if end is None else self._tree.messages(end),
            finish_reasons=reasons,
        )

    def _how_it_ended(self, reasons: tuple[FinishReason, ...]) -> tuple[TrajectoryStatus, str]:
        if self._trouble is not None:
            return self._trouble
        if not reasons:
            return TrajectoryStatus.FAILED, "nothing was asked of the model"
        return _STATUS[reasons[-1]], "" if reasons[-1] is FinishReason.STOP else reasons[-1].value


def _ids(token_ids: np.ndarray) -> np.ndarray:
    """int32 [N]: as rendered, or an error of ours."""
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise TypeError(f"a renderer gives int32 [N], not {token_ids.dtype} {list(token_ids.shape)}")
    return token_ids


def _ended(message: Message, sampled: Sampled, request: GenerateRequest) -> TurnEnded:
    reason, token_ids = sampled.end.finish_reason, sampled.token_ids
    by_id = len(token_ids) > 0 and int(token_ids[-1]) in request.stop_ids
    return TurnEnded(
        message=message,
        finish_reason=reason,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=sampled.end.cached_tokens,
        sampled_tokens=len(token_ids),
        by_stop_string=reason is FinishReason.STOP and bool(request.stop_strings) and not by_id,
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
