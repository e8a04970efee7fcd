"""Everything that can be known to be wrong before anything heavy starts. Loads no model and no torch."""

from __future__ import annotations

import importlib.util
import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fathom.config.families import EngineKind, Tracker
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError, DataError, MissingDependencyError
from fathom.core.ports.environment import DemonstratedEnvironment, Environment, Task
from fathom.envs.registry import build_environment
from fathom.run.history.folder import free_bytes
from fathom.text.characters import save_character_tokenizer
from fathom.text.chat_renderer import ChatRenderer
from fathom.text.tokenizer import Tokenizer

_STATE_BYTES_PER_PARAMETER = 3 * 4
"""Float32 masters and two moments."""
_SPARE_BYTES = 64 << 20
_TINY_PARAMETERS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedTask:
    """A task with the ids it is asked by."""

    task: Task
    """The task."""
    prompt_ids: np.ndarray
    """int32 [P]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A run that can start."""

    config: RunConfig
    """Validated options."""
    environment: Environment
    """Tasks and grader."""
    tokenizer: Tokenizer
    """Text to ids and back."""
    renderer: ChatRenderer
    """Messages to ids."""
    train: tuple[PromptedTask, ...]
    """Tasks to train on."""
    held_out: tuple[PromptedTask, ...]
    """Tasks to evaluate on; empty without an evaluation."""
    left_out: tuple[str, ...]
    """Ids of tasks whose prompts are too long."""


def resolve(config: RunConfig, environment: Environment | None = None) -> Resolved:
    """Check what the options refer to: packages, model folder, tasks, prompts, disk, port.

    Args:
        config: validated options.
        environment: given from Python instead of named by `task.kind`.

    Raises:
        ConfigError: the run cannot start; the message says what to change.
    """
    _check_packages(config)
    _check_port(config)
    tokenizer, vocab_size, max_positions = _model_facts(config)
    _check_kept_sets(config, vocab_size)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds the {max_positions} positions of "
            "the model; lower one of them"
        )
    _check_disk(config)
    environment = environment or build_environment(config.task.kind, config.task.options)
    if config.warm_start is not None and not isinstance(environment, DemonstratedEnvironment):
        raise ConfigError(
            f"[warm_start] needs demonstrations, and task.kind = {config.task.kind!r} has none; remove it"
        )
    renderer = ChatRenderer(tokenizer, use_template=config.model.chat_template and config.model.path is not None)
    train, left_out = _prompts(environment.tasks(), renderer, config.rollout.max_prompt_tokens)
    if not train:
        raise DataError(_nothing_to_train(len(left_out), config))
    held_out: tuple[PromptedTask, ...] = ()
    if config.evaluation is not None:
        wanted = environment.eval_tasks()[: config.evaluation.tasks]
        held_out, _ = _prompts(wanted, renderer, config.rollout.max_prompt_tokens)
        if len(held_out) < config.evaluation.tasks:
            raise ConfigError(
                f"evaluation.tasks = {config.evaluation.tasks}, but the task set holds out only {len(held_out)} "
                "that fit rollout.max_prompt_tokens"
            )
    return Resolved(
        config=config,
        environment=environment,
        tokenizer=tokenizer,
        renderer=renderer,
        train=train,
        held_out=held_out,
        left_out=left_out,
    )


def describe(resolved: Resolved) -> list[str]:
    """What the run will do, in sentences."""
    config = resolved.config
    clock, trainer, rollout = config.staleness, config.trainer, config.rollout
    model = config.model.path or f"a tiny model made from seed {config.seed} ({config.model.tiny})"
    lines = [
        f"start from {model} in {trainer.dtype}; trainer on {trainer.device}, engine ({config.engine.kind}) on "
        f"{config.engine.device}",
        f"train on {len(resolved.train)} tasks of {config.task.kind!r}"
        + (f" ({len(resolved.left_out)} left out: prompt too long)" if resolved.left_out else ""),
        f"take {trainer.steps} steps of {trainer.groups_per_step} groups x {rollout.group_size} trajectories, "
        f"at most {rollout.max_in_flight} in flight",
        f"train no token older than {clock.max_staleness} versions (KV: {clock.kv_bound}); when one would be: "
        f"{clock.on_stale}",
        f"publish every {clock.publish_every} steps over {config.sync.transport!r}; running generations: "
        f"{rollout.in_flight}",
    ]
    if config.warm_start is not None:
        lines.insert(1, f"warm start: {config.warm_start.steps} supervised steps on {config.warm_start.tasks} tasks")
    if config.evaluation is not None:
        lines.append(f"evaluate on {len(resolved.held_out)} held-out tasks, before and after")
    return lines


def _check_packages(config: RunConfig) -> None:
    for tracker in config.trackers:
        package = {Tracker.TENSORBOARD: "tensorboard", Tracker.WANDB: "wandb"}[tracker]
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"trackers = ['{tracker}']", package, tracker.value)


def _check_port(config: RunConfig) -> None:
    if config.engine.kind is not EngineKind.EMBEDDED or config.engine.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.engine.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.engine.host, config.engine.port))
        except OSError as error:
            raise ConfigError(
                f"engine.port = {config.engine.port} on {config.engine.host} cannot be used ({error.strerror}); "
                "choose another, or 0 for any free one"
            ) from None


def _model_facts(config: RunConfig) -> tuple[Tokenizer, int, int]:
    """Tokenizer, vocabulary size and longest sequence, without loading weights."""
    if config.model.path is None:
        with tempfile.TemporaryDirectory() as folder:
            vocabulary = save_character_tokenizer(Path(folder))
            return Tokenizer.load(Path(folder)), vocabulary.size, vocabulary.max_positions
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {config.model.path!r} is no folder; make one with `fathom models fetch`, or download it"
        )
    tokenizer = Tokenizer.load(folder)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab_size, max_positions = int(facts["vocab_size"]), int(facts["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path = {config.model.path!r} has no usable config.json: {error!r}") from None
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path = {config.model.path!r} has no weights (*.safetensors)")
    if config.model.chat_template and tokenizer.template is None:
        raise ConfigError(
            f"model.path = {config.model.path!r} has no chat template; set model.chat_template = false to prompt with "
            "plain text"
        )
    return tokenizer, vocab_size, max_positions


def _check_kept_sets(config: RunConfig, vocab_size: int) -> None:
    sampling = config.rollout.sampling.params()
    largest = min(sampling.top_k or vocab_size, vocab_size)
    if sampling.truncates and largest > config.rollout.max_kept_ids:
        raise ConfigError(
            f"rollout.sampling may keep up to {largest} ids for one token, and each has to be recorded; set "
            f"rollout.sampling.top_k to at most {config.rollout.max_kept_ids}, or raise rollout.max_kept_ids"
        )


def _check_disk(config: RunConfig) -> None:
    if config.model.path is None:
        parameters, weight_bytes = _TINY_PARAMETERS, 4 * _TINY_PARAMETERS
    else:
        weight_bytes = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
        parameters = weight_bytes // 2
    one = weight_bytes + parameters * _STATE_BYTES_PER_PARAMETER
    needed = one * (config.checkpoint.keep + 1) + _SPARE_BYTES
    free = free_bytes(Path(config.runs_dir))
    if free < needed:
        raise ConfigError(
            f"runs_dir {config.runs_dir!r} has {free / 1e9:.2f} GB free, but checkpoints may need "
            f"{needed / 1e9:.2f} GB; free some space, lower checkpoint.keep, or set runs_dir to another disk"
        )


def _prompts(
    tasks: Sequence[Task], renderer: ChatRenderer, max_prompt_tokens: int
) -> tuple[tuple[PromptedTask, ...], tuple[str, ...]]:
    kept: list[PromptedTask] = []
    left_out: list[str] = []
    for task in tasks:
        prompt_ids = renderer.render_prompt(task.messages)
        if len(prompt_ids) > max_prompt_tokens:
            left_out.append(task.id)
        else:
            kept.append(PromptedTask(task=task, prompt_ids=prompt_ids))
    return tuple(kept), tuple(left_out)


def _nothing_to_train(left_out: int, config: RunConfig) -> str:
    if left_out:
        return (
            f"all {left_out} prompts are longer than rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}; "
            "raise it, or choose shorter tasks"
        )
    return f"task.kind = {config.task.kind!r} has no training tasks; look at task.options"
