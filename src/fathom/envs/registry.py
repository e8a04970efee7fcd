"""From the name in a config to an environment. The one place that imports by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, JsonValue

from fathom.config.load import parse_section
from fathom.core.errors import ConfigError, DataError, FathomError
from fathom.core.ports.agent import AgentEnvironment
from fathom.core.ports.environment import ComparingEnvironment, Environment, Task
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.envs.gymnasium.environment import GymnasiumEnvironment, GymnasiumOptions
from fathom.envs.harbor.environment import HarborEnvironment, HarborOptions
from fathom.envs.mcp.environment import McpEnvironment, McpOptions
from fathom.envs.reasoning_gym import ReasoningGym, ReasoningGymOptions
from fathom.envs.rows import Rows, RowsOptions
from fathom.envs.verifiers.environment import VerifiersEnvironment, VerifiersOptions

AnyEnvironment = Environment | AgentEnvironment
"""Single-turn, or one in which an agent acts."""


def _gymnasium(options: GymnasiumOptions) -> GymnasiumEnvironment:
    """`env` may name a class, as `task.kind` may."""
    make = _find_class(options.env, "task.options.env") if ":" in options.env else None
    return GymnasiumEnvironment(options, make)


BUILT_IN: dict[str, tuple[type[BaseModel], Callable[..., AnyEnvironment]]] = {
    "arithmetic": (ArithmeticOptions, Arithmetic),
    "reasoning_gym": (ReasoningGymOptions, ReasoningGym),
    "rows": (RowsOptions, Rows),
    "harbor": (HarborOptions, HarborEnvironment),
    "gymnasium": (GymnasiumOptions, _gymnasium),
    "mcp": (McpOptions, McpEnvironment),
    "verifiers": (VerifiersOptions, VerifiersEnvironment),
}
"""Kind to (model of its options, class that takes them)."""


def build_environment(kind: str, options: Mapping[str, JsonValue]) -> AnyEnvironment:
    """Build and check the environment that `task.kind` and `task.options` name.

    A class of one's own, `package.module:ClassName`, may lie in the working directory. If it declares `Options`, a
    pydantic model, its constructor takes one; otherwise its constructor takes nothing and options are refused.

        class Riddles:
            class Options(Section):
                path: str

            def __init__(self, options: Options) -> None: ...

    Raises:
        ConfigError: unknown kind, bad options, or a class that is not an environment. DataError: unusable data.
    """
    if kind in BUILT_IN:
        model, make = BUILT_IN[kind]
        return require_environment(make(parse_section(model, options, origin="task.options")), kind)
    if ":" in kind:
        return require_environment(_build_own(kind, options), kind)
    near = difflib.get_close_matches(kind, BUILT_IN, n=1)
    raise ConfigError(
        f"unknown task.kind {kind!r}"
        + (f"; did you mean {near[0]!r}?" if near else ".")
        + f" Built in: {', '.join(BUILT_IN)}; a class of your own is written 'package.module:ClassName'"
    )


def require_environment(candidate: object, origin: str) -> AnyEnvironment:
    """Return `candidate` if it satisfies one of the two ports and its tasks can be told apart.

    Raises:
        ConfigError: what it lacks. DataError: it has no training tasks.
    """
    if not isinstance(candidate, Environment | AgentEnvironment):
        lacks = [name for name in ("tasks", "eval_tasks", "grade") if name not in dir(candidate)]
        raise ConfigError(
            f"task {origin}: {type(candidate).__name__} is no environment: it has no {', '.join(lacks)}"
            + (" (or `episode`, if an agent acts in it)" if "grade" in lacks else "")
        )
    if isinstance(candidate, Environment) and isinstance(candidate, AgentEnvironment):
        raise ConfigError(
            f"task {origin}: {type(candidate).__name__} has both `grade` and `episode`: a task is single-turn, or "
            "an agent acts in it; remove one of them"
        )
    if isinstance(candidate, ComparingEnvironment) and not inspect.iscoroutinefunction(candidate.grade_group):
        raise ConfigError(f"task {origin}: write `async def grade_group`: it runs in an event loop")
    if not candidate.tasks():
        raise DataError(f"task {origin}: there are no training tasks; check the data and the limits on it")
    seen: set[str] = set()
    for task in (*candidate.tasks(), *candidate.eval_tasks()):
        if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code may return anything
            raise ConfigError(f"task {origin}: tasks() gave a {type(task).__name__}; it must give Task records")
        if task.id in seen:
            raise ConfigError(f"task {origin}: the task id {task.id!r} occurs twice; ids are unique over both sets")
        seen.add(task.id)
    return candidate


def _build_own(kind: str, options: Mapping[str, JsonValue]) -> object:
    make = _find_class(kind, "task.kind")
    model = inspect.getattr_static(make, "Options", None)
    if model is None and options:
        raise ConfigError(f"task {kind} takes no options (it declares no `Options`); remove {', '.join(options)}")
    if model is not None and not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise ConfigError(f"task {kind}: `Options` must be a pydantic model, e.g. a subclass of fathom's Section")
    arguments = () if model is None else (parse_section(model, options, origin="task.options"),)
    try:
        return make(*arguments)
    except FathomError:
        raise
    except Exception as error:  # user code may fail in any way; here it becomes one clear error
        raise ConfigError(f"task {kind} could not be made: {type(error).__name__}: {error}") from error


def _find_class(kind: str, option: str) -> type:
    module_name, _, class_name = kind.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a file beside the config is found, here and in the grader processes
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} {kind!r}: {error}; looked in {here} and the installed packages") from error
    except Exception as error:  # importing user code may fail in any way
        raise ConfigError(f"{option} {kind!r}: its module fails: {type(error).__name__}: {error}") from error
    found = vars(module).get(class_name)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        near = difflib.get_close_matches(class_name, classes, n=1)
        raise ConfigError(
            f"{option} {kind!r}: {module_name} has no class {class_name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return found
