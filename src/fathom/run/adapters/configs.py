"""The config of each adapter of a run that trains several: what it would be by itself. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathom.config.families import EngineKind, LoraPublish
from fathom.config.load import parse_root
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.envs.registry import AnyEnvironment
from fathom.run.resolve import Resolved, describe, resolve


def configs_of(config: RunConfig) -> dict[str, RunConfig]:
    """By the adapter's name: the run's options with the adapter's own in their places, called by that name.

    Raises:
        ConfigError: an adapter cannot be trained so, or not beside others; names what to change.
    """
    if not config.adapters:
        raise ConfigError("there are no [adapters.NAME]; start a run of one adapter with fathom.Run")
    if config.engine.kind is not EngineKind.EMBEDDED:
        raise ConfigError(
            f"engine.kind = '{config.engine.kind}' serves one adapter a process, and [adapters] share one; set "
            "engine.kind = 'embedded', or train them in runs of their own"
        )
    tree = config.model_dump(mode="json", exclude_unset=True, exclude={"adapters"})
    if config.staleness.max_staleness == 0:
        tree.get("rollout", {}).pop("in_flight", None)  # implied, and perhaps not for each adapter
    return {name: _config_of(name, config, tree) for name in config.adapters}


def resolve_each(config: RunConfig, environments: Mapping[str, AnyEnvironment]) -> dict[str, Resolved]:
    """Check what each adapter's options refer to, as of a run by itself.

    Args:
        config: of the run.
        environments: by the adapter's name, for those whose tasks are given from Python.

    Raises:
        ConfigError: the run cannot start; says for which adapter.
    """
    if strange := sorted(environments.keys() - config.adapters.keys()):
        raise ConfigError(f"environments are given for {', '.join(strange)}, which [adapters] does not have")
    found: dict[str, Resolved] = {}
    for name, own in configs_of(config).items():
        try:
            found[name] = resolve(own, environments.get(name))
        except ConfigError as error:
            raise ConfigError(f"[adapters.{name}]: {error}") from error
    return found


def describe_each(resolved: Mapping[str, Resolved]) -> list[str]:
    """What the run will do, in sentences."""
    return [f"{name}: {line}" for name, each in resolved.items() for line in describe(each)]


def _config_of(name: str, config: RunConfig, tree: Mapping[str, Any]) -> RunConfig:
    own = parse_root(RunConfig, config.adapters[name].over(tree) | {"name": name}, f"[adapters.{name}]")
    if own.lora is None:
        raise ConfigError(f"[adapters.{name}] trains an adapter, but there is no [lora]; add one to the run")
    if own.lora.publish is LoraPublish.MERGED:
        raise ConfigError(
            "lora.publish = 'merged' puts one adapter into the base that all adapters share; set lora.publish = "
            "'adapter', or train them in runs of their own"
        )
    if own.sync.chain.store is None:
        return own
    chain = own.sync.chain.model_copy(update={"store": f"{own.sync.chain.store.rstrip('/')}/{name}"})
    return own.model_copy(update={"sync": own.sync.model_copy(update={"chain": chain})})
