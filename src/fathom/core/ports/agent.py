"""The port of environments in which an agent acts: it talks to a base URL, as it would to any provider of models.

Whatever the agent is, an async function or a program that nobody will rewrite, it needs a base URL and a key. What the
model was sent and sampled is kept on the other side of that URL; nothing here knows tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from fathom.core.ports.environment import Task
from fathom.core.records.message import Message
from fathom.core.records.sampling import FinishReason
from fathom.core.records.trajectory import Graded, Reward, Ungraded


class Endpoint(msgspec.Struct, frozen=True, tag="endpoint.1"):
    """Where an agent finds its model."""

    base_url: str
    """Without a path. For OpenAI's clients add `/v1`; Anthropic's take it as it is."""
    key: str
    """The API key. It names the session: one episode, one key."""
    model: str
    """What to call the model."""


class Acting(StrEnum):
    """How an agent's work ended."""

    ENDED = "ended"
    """It returned."""
    TIMEOUT = "timeout"
    """Its time was over, or it says that a limit stopped it (`CutShortError`). What it left is graded all the same."""
    FAILED = "failed"
    """It raised, or its program ended with an error. Graded all the same: the environment may tell why."""


class Transcript(msgspec.Struct, frozen=True, tag="transcript.1"):
    """What an episode looked like from the agent's side."""

    messages: tuple[Message, ...]
    """The conversation that ended last. Empty: the model was asked nothing."""
    finish_reasons: tuple[FinishReason, ...]
    """Of all turns, in the order in which they ended."""
    acting: Acting
    """How acting ended."""
    detail: str
    """Why, for people. Empty: it returned."""


class Played(msgspec.Struct, frozen=True, tag="played.1"):
    """How an episode went."""

    reward: Reward
    """The grader's, or why there is none: `boot_error`, `boot_timeout`, `boot_died`, `agent_died`, `grader_error`,
    `grader_timeout`, `grader_died`, or what made grading pointless."""
    acting: Acting | None
    """How acting ended. None: it did not come to that."""
    detail: str
    """Why acting ended so, for people. Empty: it returned."""
    fault: str
    """What went wrong when it was closed, after the reward was given. Empty: nothing."""


Tell = Callable[[Acting, str], Awaitable[Transcript | Ungraded]]
"""Acting has ended so, for this reason: what the model was asked and said, or why nothing is to be graded."""
Play = Callable[[Task, Endpoint, Tell], Awaitable[Played]]
"""Play an episode to its end. Nothing that an environment or an agent does raises out of it."""


class AgentEpisode(Protocol):
    """One attempt at a task. The calls come in this order, each under a limit of its own; `close` always comes.

    It lives in a process of its own, which is killed after `close`, with all that it started. A call whose time is
    over is cancelled; one that does not end then is interrupted, and at last its process is killed, without `close`.
    """

    async def boot(self) -> None:
        """Make the world ready. An exception means *ungraded*, cause `boot_error`."""
        ...

    async def act(self, endpoint: Endpoint) -> None:
        """Let the agent work."""
        ...

    async def grade(self, transcript: Transcript) -> Graded:
        """Judge what it left. An exception means *ungraded*, cause `grader_error`, never reward 0."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


@runtime_checkable
class AgentEnvironment(Protocol):
    """A set of tasks in which an agent acts. Instances are sent to a process when a run starts: picklable."""

    def tasks(self) -> Sequence[Task]:
        """Training tasks, in a fixed order."""
        ...

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out tasks, disjoint from `tasks`. May be empty."""
        ...

    def episode(self, task: Task) -> AgentEpisode:
        """A new attempt at a task. Does nothing yet."""
        ...


@runtime_checkable
class DemonstratedAgentEnvironment(AgentEnvironment, Protocol):
    """An environment that can also say how tasks are solved, for a supervised warm start."""

    def script(self, task: Task) -> Sequence[Message]:
        """What a model would say to solve it, answer by answer, with its calls of tools.

        The agent plays it for real, with this in the model's place: it must ask for all of it and get a reward above 0.
        """
        ...
