"""A taskset of verifiers as an environment: a harness of verifiers' plays its tasks with our model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, final

from pydantic import Field, JsonValue, model_validator

from fathom.config.section import Section
from fathom.core.errors import CutShortError, DataError, UngradedError
from fathom.core.ids import TaskId
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded
from fathom.envs.verifiers.program import VERSION, Finished, Player, PlayerError, Players, list_tasks

_LIMITS = frozenset(
    {"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed", "agent_timeout"}
)
"""Stop conditions of verifiers by which an agent is cut short, and scored all the same."""


class VerifiersOptions(Section):
    """Which taskset, which harness plays it, and the Python environment in which both are installed."""

    python: str = Field(min_length=1)
    """Interpreter of an environment that holds `verifiers` 0.4.0 and `uv`. It has pins of its own, so it is another
    environment than Fathom's."""
    taskset: str = Field(min_length=1)
    """Id of the taskset: a package that is installed there, or a module in the working directory."""
    taskset_options: dict[str, JsonValue] = Field(default={})
    """The taskset's own options."""
    harness: str = "null"
    """Id of the harness. `null` asks the model and lets it call the taskset's tools."""
    harness_options: dict[str, JsonValue] = Field(default={})
    """The harness's own options."""
    agent: dict[str, JsonValue] = Field(default={})
    """More of verifiers' options of an agent, e.g. `max_turns` and `timeout`."""
    size: int = Field(default=1000, gt=0)
    """Training tasks at most."""
    eval_size: int = Field(default=0, ge=0)
    """Held-out tasks: the first ones. Those of training follow."""
    variables: dict[str, str] = Field(default={})
    """Variables of its environment beside `PATH`, `HOME`, locale and folders; of the run's own it gets no other."""
    load_timeout_s: float = Field(default=300.0, gt=0)
    """For listing the tasks when a run starts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if taken := [name for name in ("harness", "runtime", "client", "model") if name in self.agent]:
            raise ValueError(f"agent: {', '.join(taken)} is set from elsewhere; remove it there")
        return self


@final
class VerifiersEnvironment:
    """An `AgentEnvironment`. Components are the taskset's rewards, each times its weight.

    The harness runs in verifiers' `subprocess` runtime: as a program of this machine's, not in a sandbox. An error that
    verifiers records is *ungraded*, e.g. `verifiers_task_error`; so is a task that it did not score.
    """

    def __init__(self, options: VerifiersOptions) -> None:
        """Have the tasks listed.

        Raises:
            ConfigError: no verifiers, another release of it, or it refuses the options. DataError: too few tasks.
        """
        self._options = options
        self._env: dict[str, Any] = {
            "taskset": options.taskset_options | {"id": options.taskset},
            "agent": options.agent
            | {"harness": options.harness_options | {"id": options.harness}, "runtime": {"type": "subprocess"}},
        }
        most = options.eval_size + options.size
        keys = list_tasks(options.python, options.variables, self._env, most, options.load_timeout_s).keys
        self._players = Players(options.python, options.variables, self._env, len(keys))
        if len(keys) <= options.eval_size:
            raise DataError(
                f"taskset {options.taskset} has {len(keys)} tasks, and the first {options.eval_size} (eval_size) are "
                "held out; hold out fewer"
            )
        tasks = [
            Task(id=TaskId(f"{'eval' if n < options.eval_size else 'train'}/{n}"), messages=(), answer=key)
            for n, key in enumerate(keys)
        ]
        self._eval, self._train = tuple(tasks[: options.eval_size]), tuple(tasks[options.eval_size :])

    def tasks(self) -> Sequence[Task]:
        """Training tasks."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out tasks."""
        return self._eval

    def episode(self, task: Task) -> AgentEpisode:
        """A new attempt."""
        return _Episode(self._options, self._players, task)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_players"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        options = self._options
        self._players = Players(options.python, options.variables, self._env, len(self._eval) + len(self._train))
        self._players.start()  # where episodes are forked from, so that none waits for what another has loaded


@final
class _Episode:
    """An `AgentEpisode`. verifiers scores by itself at the end of acting; `grade` says what it found."""

    def __init__(self, options: VerifiersOptions, players: Players, task: Task) -> None:
        self._options = options
        self._players = players
        self._task = task
        self._player: Player | None = None
        self._finished: Finished | None = None
        self._fault = "it was not over in time"

    async def boot(self) -> None:
        position = int(self._task.id.rpartition("/")[2])
        self._player = await Player.start(self._players, position, self._task.answer)

    async def act(self, endpoint: Endpoint) -> None:
        """Raises CutShortError: a limit of verifiers' ended it. PlayerError: verifiers ended."""
        assert self._player is not None, "booted"
        try:
            self._finished = await self._player.play(endpoint.base_url, endpoint.key, endpoint.model)
        except PlayerError as error:
            self._fault = str(error)
            raise
        if not self._finished.failed and self._finished.stopped in _LIMITS:
            raise CutShortError(f"verifiers stopped it: {self._finished.stopped}")

    async def grade(self, transcript: Transcript) -> Graded:
        finished = self._finished
        if finished is None:
            raise UngradedError("verifiers_unfinished", self._fault)
        late = finished.stopped if finished.stopped.endswith("_timeout") and finished.stopped not in _LIMITS else ""
        if cause := finished.failed or late:
            raise UngradedError(f"verifiers_{cause}", "; ".join(finished.errors) or "verifiers' own limit was over")
        components = {name: value for name, value in finished.rewards.items() if value is not None}
        if not components or len(components) < len(finished.rewards):
            raise UngradedError("verifiers_unscored", f"the taskset's rewards are {finished.rewards}")
        return Graded(
            components=components,
            grader=f"verifiers/{VERSION} {self._options.taskset}",
            answer_found=bool(transcript.messages),
        )

    async def close(self) -> None:
        if self._player is not None:
            await self._player.close()
