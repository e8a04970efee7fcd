"""Harbor itself: its environments by name. The only module that imports `harbor`, and only when one is asked for."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

from pydantic import JsonValue

from fathom.core.errors import ConfigError
from fathom.envs.harbor.folder import HarborTask
from fathom.envs.harbor.places.provider_place import Box
from fathom.envs.sandbox.view import require_tools

RELEASE = "0.25"
"""The release of Harbor that the adapter was written for."""
INSTALL = f"pip install 'harbor=={RELEASE}.*'"
"""How to have it; providers need extras of Harbor's beside, as `harbor[modal]`."""
LOCAL = "local"
"""What stands for no provider."""
PYTHON = (3, 12)
"""The oldest Python in which it runs."""

_OURS = frozenset(
    {"type", "environment_dir", "environment_name", "session_id", "trial_paths", "task_env_config", "network_policy"}
)


def installed() -> str | None:
    """The release of Harbor that is installed. None: there is none."""
    try:
        return version("harbor")
    except PackageNotFoundError:
        return None


def require_harbor(provider: str, python: tuple[int, int], release: str | None) -> None:
    """Nothing, if Harbor can be used.

    Args:
        provider: what was asked for.
        python: version of the interpreter.
        release: of Harbor. None: it is not installed.

    Raises:
        ConfigError: it cannot, and what to do.
    """
    option = f"task.options.provider = {provider!r}"
    elsewhere = "or remove it: the local sandbox runs task folders without Harbor"
    if python < PYTHON:
        raise ConfigError(
            f"{option} needs Harbor, and Harbor needs Python {PYTHON[0]}.{PYTHON[1]} or newer (this is "
            f"{python[0]}.{python[1]}): install Fathom in an environment of a newer Python, and there {INSTALL}; "
            f"{elsewhere}"
        )
    if release is None:
        raise ConfigError(f"{option} needs the package 'harbor', which is not installed; run: {INSTALL}; {elsewhere}")
    if release.split(".")[:2] != RELEASE.split("."):
        raise ConfigError(f"{option}: harbor {release} is installed, and {RELEASE} is needed; run: {INSTALL}")


def provider_of(name: str, options: Mapping[str, JsonValue]) -> Provider | None:
    """Harbor's provider of a name. None: `local`, the sandbox of this machine, for which all is there.

    Raises:
        ConfigError: see `Provider`; options for the local sandbox; or a program that it needs is missing.
    """
    if name != LOCAL:
        return Provider(name, options)
    if options:
        raise ConfigError(
            f"task.options.provider_options ({', '.join(options)}) are of Harbor's providers; name one as "
            "task.options.provider, or remove them"
        )
    require_tools()
    return None


@final
class Provider:
    """Makes Harbor's environments of one kind. It can be sent to another process, where Harbor is loaded at once."""

    def __init__(self, name: str, options: Mapping[str, JsonValue]) -> None:
        """Look at what is there: Harbor, the provider and its credentials.

        Args:
            name: Harbor's name of the environment (`docker`, `modal`, ...), or the import path that Harbor is to take,
                `package.module:ClassName`.
            options: what its constructor is given, as `--environment-kwarg` of Harbor's command line does.

        Raises:
            ConfigError: one of these is missing, or an option is not the provider's to be given.
        """
        require_harbor(name, sys.version_info[:2], installed())
        if taken := sorted(_OURS & set(options)):
            raise ConfigError(f"task.options.provider_options: {', '.join(taken)} comes from the task; remove it there")
        self._name = name
        self._options = dict(options)
        self._load()

    def box(self, task: HarborTask, folder: Path) -> Box:
        """A world for one attempt at a task; nothing starts yet. Whatever Harbor keeps of it is put into `folder`.

        Raises:
            Exception: the provider cannot do what the task asks for.
        """
        from harbor.environments.factory import EnvironmentFactory  # pyright: ignore[reportMissingImports]
        from harbor.models.environment_type import EnvironmentType  # pyright: ignore[reportMissingImports]
        from harbor.models.task.config import TaskConfig  # pyright: ignore[reportMissingImports]
        from harbor.models.trial.paths import TrialPaths  # pyright: ignore[reportMissingImports]

        config: Any = TaskConfig.model_validate_toml((task.folder / "task.toml").read_text(encoding="utf-8"))
        paths: Any = TrialPaths(trial_dir=folder)
        paths.mkdir()
        given: dict[str, Any] = {
            "environment_dir": task.folder / "environment",
            "environment_name": task.id,
            "session_id": f"fathom-{task.id}-{secrets.token_hex(4)}",
            "trial_paths": paths,
            "task_env_config": config.environment,
            "network_policy": config.environment.resolve_baseline(),
            **self._options,
        }
        if ":" in self._name:
            return EnvironmentFactory.create_environment_from_import_path(self._name, **given)
        return EnvironmentFactory.create_environment(type=EnvironmentType(self._name), **given)

    def _load(self) -> None:
        from harbor.environments.factory import EnvironmentFactory  # pyright: ignore[reportMissingImports]
        from harbor.models.environment_type import EnvironmentType  # pyright: ignore[reportMissingImports]

        own = ":" in self._name
        try:
            kind = None if own else EnvironmentType(self._name)
        except ValueError:
            known = ", ".join(each.value for each in EnvironmentType)
            raise ConfigError(f"task.options.provider {self._name!r} is none of Harbor's: {known}") from None
        try:
            EnvironmentFactory.run_preflight(kind, self._name if own else None)
        except (SystemExit, Exception) as error:  # a provider's own check may fail in any way
            raise ConfigError(
                f"task.options.provider = {self._name!r} cannot be used: {error or type(error).__name__}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._load()  # once, in the process that episodes are forked from
