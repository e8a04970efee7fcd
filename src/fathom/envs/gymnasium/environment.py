"""A world of Gymnasium's API as an environment: observations are the user's messages, answers are actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, final

from pydantic import Field, JsonValue, model_validator

from fathom.config.section import Section
from fathom.core.errors import CutShortError, UngradedError
from fathom.core.ids import TaskId
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded
from fathom.envs.agents.tool_loop import tool_loop
from fathom.envs.gymnasium.words import ActionForm, ObservationForm, describe_observation, no_action, read_action
from fathom.envs.gymnasium.world import World, make_by_id, require_id


class GymnasiumOptions(Section):
    """Which world, which instances of it, and how a model plays it."""

    env: str = Field(min_length=1)
    """A registered id, e.g. `FrozenLake-v1`, or `package.module:ClassName` of one's own with Gymnasium's API."""
    arguments: dict[str, JsonValue] = Field(default={})
    """What it is made with."""
    size: int = Field(default=1000, gt=0)
    """Training instances."""
    eval_size: int = Field(default=100, ge=0)
    """Held-out instances, of other seeds."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the first held-out instance; the others follow, then those of training."""
    system: str = ""
    """System prompt. Empty: none."""
    instruction: str = ""
    """What the model is told before the first observation. Empty: nothing."""
    observation: ObservationForm = ObservationForm.TEXT
    """How it is told of observations."""
    action: ActionForm = ActionForm.TEXT
    """How it acts."""
    action_names: tuple[str, ...] = ()
    """Names of the actions 0, 1, ...; with `action = "name"` only."""
    max_turns: int = Field(default=32, gt=0)
    """Answers of the model in one episode, at most."""
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """Of one answer of the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.action is ActionForm.NAME) != bool(self.action_names):
            raise ValueError("action = 'name' and action_names go together; set both or none")
        if len({name.lower() for name in self.action_names}) < len(self.action_names) or "" in self.action_names:
            raise ValueError(f"action_names must be different, whatever their case, and not empty: {self.action_names}")
        return self


@final
class GymnasiumEnvironment:
    """An `AgentEnvironment`. The component `return` is the sum of the world's rewards.

    `terminated` ends an episode as completed. A limit, the world's (`truncated`) or `max_turns`, ends it as truncated,
    and it is graded by what it has. A world that raises is a fault of the world: *ungraded*, `environment_error`.
    """

    def __init__(self, options: GymnasiumOptions, make: Callable[..., World] | None = None) -> None:
        """`make` makes a world from `options.arguments`; a class of a module. None: the one registered as `env`.

        Raises:
            ConfigError: nothing is registered under that name. MissingDependencyError: `gymnasium` is not installed.
        """
        if make is None:
            require_id(options.env)
        self._options = options
        self._make = make
        first = options.seed
        self._eval = tuple(_task("eval", first + n) for n in range(options.eval_size))
        self._train = tuple(_task("train", first + options.eval_size + n) for n in range(options.size))

    def tasks(self) -> Sequence[Task]:
        """Training instances."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out instances."""
        return self._eval

    def episode(self, task: Task) -> AgentEpisode:
        """A new attempt."""
        return _Episode(self._options, self._make, int(task.answer))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._make is None:
            require_id(self._options.env)  # loads the package here, so that no episode waits for it


def _task(part: str, seed: int) -> Task:
    return Task(id=TaskId(f"{part}/{seed}"), messages=(), answer=str(seed))


@final
class _Episode:
    """An `AgentEpisode`."""

    def __init__(self, options: GymnasiumOptions, make: Callable[..., World] | None, seed: int) -> None:
        self._options = options
        self._make = make
        self._seed = seed
        self._world: World | None = None
        self._seen = ""
        self._return = 0.0
        self._steps = 0
        self._fault = ""

    async def boot(self) -> None:
        arguments: dict[str, Any] = dict(self._options.arguments)
        if self._options.observation is ObservationForm.DRAWING:
            arguments.setdefault("render_mode", "ansi")
        self._world = make_by_id(self._options.env, arguments) if self._make is None else self._make(**arguments)
        observation, _ = self._world.reset(seed=self._seed)
        self._seen = describe_observation(self._options.observation, observation, self._world)

    async def act(self, endpoint: Endpoint) -> None:
        """Raises CutShortError: a limit ended it. What the world raises is raised."""
        options = self._options
        told = "\n\n".join(part for part in (options.instruction, self._seen) if part)
        messages: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
        for _ in range(options.max_turns):
            messages.append({"role": "user", "content": told})
            before = len(messages)
            messages = await tool_loop(endpoint, messages, max_turns=1, timeout_s=options.answer_timeout_s)
            if len(messages) == before:
                return  # no room for more: the session says so
            answer = self._answer(str(messages[-1].get("content") or ""))
            if answer is None:
                return
            told = answer
        raise CutShortError(f"all {options.max_turns} answers (max_turns) are used up")

    def _answer(self, said: str) -> str | None:
        """Act on what the model said; returns what it is told. None: the world is done."""
        assert self._world is not None, "booted"
        options = self._options
        try:
            action = read_action(options.action, said, options.action_names, self._world)
            if action is None:
                return no_action(options.action, options.action_names)
            observation, reward, terminated, truncated, _ = self._world.step(action)
            self._return += float(reward)
            self._steps += 1
            if terminated:
                return None
            if not truncated:
                return describe_observation(options.observation, observation, self._world)
        except Exception as error:
            self._fault = f"step {self._steps}: {type(error).__name__}: {error}"
            raise
        raise CutShortError(f"the world cut it after {self._steps} steps")

    async def grade(self, transcript: Transcript) -> Graded:
        if self._fault:
            raise UngradedError("environment_error", self._fault)
        return Graded(
            components={"return": self._return}, grader=f"gymnasium/1 {self._options.env}", answer_found=self._steps > 0
        )

    async def close(self) -> None:
        if self._world is not None:
            self._world.close()
