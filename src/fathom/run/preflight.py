"""What the machine and the engine must offer before a run may start. Loads no model and no torch."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from secrets import token_urlsafe

from fathom.config.families import EngineKind, FabricKind, LoraPublish, OptimizerKind, Tracker, TransportKind
from fathom.config.rollout import EngineConfig
from fathom.config.run import RunConfig
from fathom.config.sync import PeerConfig, SyncConfig
from fathom.core.errors import ConfigError, MissingDependencyError
from fathom.core.ports.engine import Capabilities
from fathom.run.teachers.assignment import asks_student

_PACKAGES = {Tracker.TENSORBOARD: "tensorboard", Tracker.WANDB: "wandb"}
_FABRICS = {
    FabricKind.NIXL: ("nixl_cu12", "nixl-cu12"),
    FabricKind.MOONCAKE: ("mooncake", "mooncake-transfer-engine-non-cuda"),
}
"""Module and package of each fabric between processes."""
_STATE_BYTES_PER_PARAMETER = 3 * 4
"""Float32 masters and two moments."""
_SMALLEST_ELEMENT_BYTES = 2
_SPARE_BYTES = 64 << 20


def check_machine(config: RunConfig, weight_bytes: int) -> None:
    """Look for packages, a free port, the access token and disk space.

    Args:
        config: validated options.
        weight_bytes: size of the starting weights.

    Raises:
        ConfigError: something is missing; the message names the option.
    """
    for tracker in config.trackers:
        if importlib.util.find_spec(_PACKAGES[tracker]) is None:
            raise MissingDependencyError(f"trackers = ['{tracker}']", _PACKAGES[tracker], tracker.value)
    _check_optimizers(config)
    _check_store(config.sync.chain.store)
    _check_fabric(config.sync)
    access_token(config.engine)
    _check_port(config.engine)
    _check_disk(config, weight_bytes)


def _check_optimizers(config: RunConfig) -> None:
    named = {"trainer.optimizer": config.trainer.optimizer}
    if config.trainer.critic is not None:
        named["trainer.critic.optimizer"] = config.trainer.critic.optimizer
    if config.warm_start is not None:
        named["warm_start.optimizer"] = config.warm_start.optimizer
    for option, optimizer in named.items():
        if optimizer.kind is OptimizerKind.ADAM8BIT and importlib.util.find_spec("bitsandbytes") is None:
            raise MissingDependencyError(f"{option}.kind = '{optimizer.kind}'", "bitsandbytes", optimizer.kind.value)


def _check_fabric(sync: SyncConfig) -> None:
    """Whether it can start shows when the transport is opened."""
    if sync.transport is not TransportKind.P2P:
        return
    fabric = (sync.p2p or PeerConfig()).fabric
    module, package = _FABRICS[fabric]
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(f"sync.p2p.fabric = '{fabric}'", package, fabric.value)


def access_token(engine: EngineConfig) -> str:
    """The bearer token of the engine's calls: from the variable that `token_env` names, or a fresh random one.

    Raises:
        ConfigError: the variable is unset, empty, or holds what no HTTP header can carry.
    """
    if engine.token_env is None:
        return token_urlsafe()
    token = os.environ.get(engine.token_env, "")
    if not token:
        raise ConfigError(
            f"engine.token_env = {engine.token_env!r}: that environment variable is not set or empty; export it with "
            "the access token in it, or remove the option"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"engine.token_env = {engine.token_env!r}: that variable holds spaces or characters beyond printable "
            "ASCII; choose a token without them"
        )
    return token


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds `folder` or its nearest existing parent.

    Raises:
        ConfigError: nothing can be written there.
    """
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    except (OSError, ValueError) as error:
        raise ConfigError(f"runs_dir {str(folder)!r} cannot be used: {error}") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"runs_dir {str(folder)!r} cannot be written: {existing} is no folder of yours; set another")
    return status.f_bavail * status.f_frsize


def check_engine(config: RunConfig, able: Capabilities) -> None:
    """Compare what the options ask of the engine with what it declares.

    Raises:
        ConfigError: it lacks something; the message has one line per option.
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    needs = (
        (config.rollout.in_flight in able.in_flight, f"rollout.in_flight = '{config.rollout.in_flight}'"),
        (
            config.sync.transport in able.transports,
            f"sync.transport = '{config.sync.transport}' (it takes {', '.join(sorted(able.transports))})",
        ),
        (able.barriers or not config.deterministic, "deterministic = true (its capability `barriers`)"),
        (able.pinned_versions or config.evaluation is None, "[evaluation] (its capability `pinned_versions`)"),
        (
            able.kept_sets or not config.rollout.sampling.params().truncates,
            "rollout.sampling.top_k, top_p or min_p (its capability `kept_sets`)",
        ),
        (
            able.stop_strings or not config.rollout.stop_strings,
            "rollout.stop_strings (its capability `stop_strings`)",
        ),
        (
            able.logit_bias or not config.rollout.sampling.logit_bias,
            "rollout.sampling.logit_bias (its capability `logit_bias`)",
        ),
        (
            able.ids_scored or config.distillation is None or not asks_student(config.distillation),
            "distillation.set of the student's likeliest ids (its capability `ids_scored`)",
        ),
        (
            able.adapters or config.lora is None or config.lora.publish is LoraPublish.MERGED,
            "[lora] with lora.publish = 'adapter' (its capability `adapters`; 'merged' needs none)",
        ),
        (able.routes or not config.rollout.record_routes, "rollout.record_routes (its capability `routes`)"),
        (able.kv_versions, "staleness.max_kv_staleness (its capability `kv_versions`)"),
        (able.max_context_tokens >= longest, f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"),
    )
    lacking = [option for met, option in needs if not met]
    if lacking:
        raise ConfigError(
            f"the engine (engine.kind = '{config.engine.kind}') cannot do what is asked: {'; '.join(lacking)}; "
            "change these options, or choose another engine"
        )


def _check_port(engine: EngineConfig) -> None:
    if engine.kind is not EngineKind.EMBEDDED:
        return
    family = socket.AF_INET6 if ":" in engine.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((engine.host, engine.port))
        except OSError as error:
            raise ConfigError(
                f"engine.port = {engine.port} on {engine.host} cannot be used ({error.strerror}); "
                "choose another, or 0 for any free one"
            ) from None


def _check_store(store: str | None) -> None:
    """Where the chain of versions goes, if fsspec has to reach it."""
    scheme, separator, _ = (store or "").partition("://")
    if not separator:
        return
    import fsspec  # only here: it takes its time to load

    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"sync.chain.store = {store!r}: {error}; install the fsspec package of that scheme, or name a folder"
        ) from None


def _check_disk(config: RunConfig, weight_bytes: int) -> None:
    """The checkpoints that are kept, one more while it is written, and the chain of versions."""
    models = 1 if config.trainer.critic is None else 2
    one = weight_bytes + models * (weight_bytes // _SMALLEST_ELEMENT_BYTES * _STATE_BYTES_PER_PARAMETER)
    needed = one * (config.checkpoint.keep + 1) + _SPARE_BYTES
    if config.sync.chain.store is None:
        versions = config.trainer.steps // config.staleness.publish_every + 1
        needed += min(config.sync.chain.budget_mb << 20, versions * weight_bytes)
    free = free_bytes(Path(config.runs_dir))
    if free < needed:
        raise ConfigError(
            f"runs_dir {config.runs_dir!r} has {free / 1e9:.2f} GB free, but checkpoints and the chain of "
            f"versions may need {needed / 1e9:.2f} GB; free some space, lower checkpoint.keep or sync.chain.budget_mb, "
            "or set runs_dir to another disk"
        )
