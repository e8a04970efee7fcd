"""A model that judges: asked for a number, under a deadline and a budget; whatever is no number has a cause."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Sequence
from typing import Any, Self, final
from urllib.parse import urlsplit

import httpx
import msgspec
from pydantic import Field, model_validator

from fathom.config.section import Section
from fathom.core.errors import ConfigError, UngradedError
from fathom.core.ports.environment import ChatMessage
from fathom.envs.judging.budget import Budget

_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_DETAIL_CHARS = 500


class JudgeOptions(Section):
    """Which model judges, and what it may cost."""

    base_url: str = Field(pattern=r"^https?://[^\s@]+$")
    """Where Chat Completions are served, `/v1` included. Without a password: see `token_env`."""
    model: str
    """Name of the model there."""
    token_env: str = ""
    """Name of the environment variable that holds the access token, which is never written down. Empty: none."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Of one call; afterwards it is tried again."""
    tries: int = Field(default=3, gt=0)
    """Calls at most for one judgement. Only timeouts and the answers 429 and 5xx are tried again."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Wait before the second call, doubled before each further one. A longer `Retry-After` is honoured."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Of one judgement, with all its calls and waits. The grader's own deadline must be longer."""
    max_answer_tokens: int = Field(default=16, gt=0)
    """Tokens of the judge's answer at most."""
    temperature: float = Field(default=0.0, ge=0)
    """Its sampling temperature."""
    lowest: float = 0.0
    """Smallest number that it may give."""
    highest: float = 1.0
    """Largest."""
    concurrency: int = Field(default=8, gt=0)
    """Judgements at the same time, where several are asked for at once."""
    max_calls: int | None = Field(default=None, ge=0)
    """Calls of the whole run at most, repeated ones included; a resumed run counts anew. None: no bound."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Tokens of the whole run, prompts and answers, after which nothing more is asked. None: no bound."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} must be below highest {self.highest:g}")
        return self


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int


class _Completion(msgspec.Struct):
    """The parts of a chat completion that matter here."""

    choices: list[_Choice]
    usage: _Usage | None = None


class _AgainError(Exception):
    """The call may be made again."""

    def __init__(self, cause: str, detail: str, after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.cause = cause
        self.after_s = after_s


@final
class Judge:
    """Asks a model for numbers. May be an attribute of an environment: it is picklable, and its budget is the run's.

        judge = Judge(JudgeOptions(base_url="http://127.0.0.1:8000/v1", model="judge"))
        judge.score_now("Is 2 + 2 = 5? Reply with 0 or 1.")  # in `grade`
        await judge.score("...")  # in `grade` of an agent's episode, or in `grade_group`

    Whatever comes instead of a number is an UngradedError, which a grader lets through. Its causes:

    - `judge_timeout`: no answer before the deadline, or all tries timed out.
    - `judge_unavailable`: the last try was answered 429 or 5xx. `judge_unreachable`: the connection failed.
    - `judge_refused`: another error was answered, or there is no token.
    - `judge_budget`: the run's calls or tokens are used up.
    - `judge_unreadable`: the answer is not exactly one number within the bounds, or it was cut.
    """

    def __init__(self, options: JudgeOptions) -> None:
        """Nothing is asked yet. Raises ConfigError when the variable of the token is not set."""
        self.options = options
        if options.token_env:
            try:
                self._token()
            except UngradedError as error:
                raise ConfigError(f"the judge's token_env: {error.detail}; export it") from None
        self.budget = Budget(max_calls=options.max_calls, max_tokens=options.max_tokens)

    def score_now(self, asked: str | Sequence[ChatMessage]) -> float:
        """As `score`, for graders that are no coroutines. Blocks."""
        return asyncio.run(self.score(asked))

    async def score(self, asked: str | Sequence[ChatMessage]) -> float:
        """The judge's number. Raises UngradedError: there is none."""
        return (await self.scores([asked]))[0]

    async def scores(self, asked: Sequence[str | Sequence[ChatMessage]]) -> list[float]:
        """One number for each. Raises UngradedError: one of them could not be had; the others are given up."""
        async with self._client() as client:
            places = asyncio.Semaphore(self.options.concurrency)

            async def one(messages: str | Sequence[ChatMessage]) -> float:
                async with places:
                    return await self._judge(client, messages)

            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(one(messages)) for messages in asked]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            return [task.result() for task in running]

    def scaled(self, score: float) -> float:
        """A number of the judge's, 0 for the lowest and 1 for the highest."""
        return (score - self.options.lowest) / (self.options.highest - self.options.lowest)

    def _client(self) -> httpx.AsyncClient:
        options = self.options
        headers: dict[str, str] = {}
        if options.token_env:
            headers["authorization"] = f"Bearer {self._token()}"
        url = urlsplit(options.base_url)
        return httpx.AsyncClient(
            base_url=options.base_url,
            headers=headers,
            timeout=None,  # of the whole call, below: httpx would bound each of its parts
            trust_env=url.hostname not in _LOOPBACK,
            verify=url.scheme == "https",  # reading certificates costs more than an answer
        )

    def _token(self) -> str:
        token = os.environ.get(self.options.token_env, "").strip()
        if not token or not (token.isascii() and token.isprintable()):
            raise UngradedError("judge_refused", f"the variable {self.options.token_env} holds no token")
        return token

    async def _judge(self, client: httpx.AsyncClient, asked: str | Sequence[ChatMessage]) -> float:
        """Call until there is an answer, the tries are used up or the time is over."""
        options = self.options
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + options.deadline_s
        for attempt in range(1, options.tries + 1):
            left_s = ends_s - loop.time()
            try:
                async with asyncio.timeout(min(options.timeout_s, left_s)):
                    return await self._call(client, messages)
            except TimeoutError:
                if left_s <= options.timeout_s:
                    raise self._late() from None
                failure = _AgainError("judge_timeout", f"no answer within {options.timeout_s:g} s")
            except _AgainError as error:
                failure = error
            if attempt == options.tries:
                raise UngradedError(failure.cause, f"{failure} ({attempt} tries)")
            wait_s = max(options.backoff_s * 2 ** (attempt - 1), failure.after_s)
            if loop.time() + wait_s >= ends_s:
                raise self._late(f"; before that: {failure}")
            await asyncio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _late(self, more: str = "") -> UngradedError:
        return UngradedError("judge_timeout", f"no judgement within {self.options.deadline_s:g} s{more}")

    async def _call(self, client: httpx.AsyncClient, messages: list[Any]) -> float:
        options = self.options
        self.budget.take_call()
        body = {
            "model": options.model,
            "messages": messages,
            "temperature": options.temperature,
            "max_tokens": options.max_answer_tokens,
        }
        sent = msgspec.json.encode(body)
        try:
            response = await client.post("chat/completions", content=sent, headers={"content-type": "application/json"})
        except asyncio.CancelledError:  # out of time: it may be answered all the same
            self.budget.add_tokens(len(sent) + options.max_answer_tokens)
            raise
        except httpx.TransportError as error:
            detail = self._clean(f"{options.base_url}: {type(error).__name__}: {error}")
            raise UngradedError("judge_unreachable", detail) from None
        if response.is_success:
            return self._read(response)
        detail = self._clean(f"the judge answered {response.status_code}: {response.text[:_DETAIL_CHARS]}")
        if response.status_code == 429 or response.status_code >= 500:
            raise _AgainError("judge_unavailable", detail, _retry_after_s(response))
        raise UngradedError("judge_refused", detail)

    def _read(self, response: httpx.Response) -> float:
        """The number, and nothing but a number."""
        try:
            completion = msgspec.json.decode(response.content, type=_Completion)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._spend(response, None)
            raise UngradedError("judge_unreadable", f"no chat completion was answered: {error}") from None
        self._spend(response, completion.usage)
        choice = completion.choices[0] if completion.choices else _Choice(message=_Said())
        text = (choice.message.content or "").strip()
        if choice.finish_reason == "length":
            raise self._unreadable(f"was cut at max_answer_tokens = {self.options.max_answer_tokens}", text)
        if not _NUMBER.fullmatch(text):
            raise self._unreadable("is not a number", text)
        number = float(text)
        if not (math.isfinite(number) and self.options.lowest <= number <= self.options.highest):
            raise self._unreadable(f"is outside {self.options.lowest:g} to {self.options.highest:g}", text)
        return number

    def _spend(self, response: httpx.Response, usage: _Usage | None) -> None:
        """A judge that reports no usage is charged a token for each byte: never too little."""
        sent, said = len(response.request.content), len(response.content)
        self.budget.add_tokens(sent + said if usage is None else max(0, usage.total_tokens))

    def _unreadable(self, why: str, text: str) -> UngradedError:
        return UngradedError("judge_unreadable", self._clean(f"the judge's answer {why}: {text[:_DETAIL_CHARS]!r}"))

    def _clean(self, text: str) -> str:
        """Without the token, which a server may repeat when it refuses it."""
        return text.replace(self._token(), "***") if self.options.token_env else text


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait. 0: it does not say, or says a date."""
    try:
        asked = float(response.headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return asked if math.isfinite(asked) and asked > 0 else 0.0
