"""The API of Gymnasium, as far as it is used; and worlds by their registered ids."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat

from fathom.core.errors import ConfigError, MissingDependencyError


class World(Protocol):
    """An environment as Gymnasium documents it. It need not be derived from anything."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin anew: the first observation, and more that is not used."""
        ...

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act: observation, reward, terminated (the task is over), truncated (a limit cut it), and more."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Space(Protocol):
    """A set of actions."""

    def contains(self, x: Any) -> bool:
        """Is it one of them?"""
        ...


class SpacedWorld(World, Protocol):
    """A world that knows its actions: used where they are numbers."""

    action_space: Space
    """All actions."""


class DrawnWorld(World, Protocol):
    """A world that draws itself: used where observations are drawings."""

    def render(self) -> Any:
        """With `render_mode = "ansi"`: text."""
        ...


def require_id(id: str) -> None:
    """Raises ConfigError when no world is registered under `id`, and MissingDependencyError without the package."""
    registry = _registry()
    if id not in registry:
        near = difflib.get_close_matches(id, registry, n=3)
        raise ConfigError(
            f"task.options.env: Gymnasium knows no {id!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
            + " A class of your own is written 'package.module:ClassName'"
        )


def make_by_id(id: str, arguments: Mapping[str, Any]) -> World:
    """A world that Gymnasium has registered, with the limit on its steps that it is registered with."""
    import gymnasium

    return gymnasium.make(id, disable_env_checker=True, **arguments)


def _registry() -> list[str]:
    try:
        from gymnasium import registry
    except ModuleNotFoundError as error:
        raise MissingDependencyError("task.options.env without a ':'", "gymnasium", "gymnasium") from error
    return list(registry)
