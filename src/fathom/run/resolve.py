"""Everything that can be known to be wrong before anything heavy starts. Loads no model and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.core.ports.agent import AgentEnvironment, DemonstratedAgentEnvironment
from fathom.core.ports.environment import DemonstratedEnvironment, Task
from fathom.envs.registry import AnyEnvironment, build_environment, require_environment
from fathom.run.lora_checks import check_lora
from fathom.run.preflight import check_machine
from fathom.run.starting_model import StartingModel
from fathom.run.teachers.assignment import Assignment, assign
from fathom.run.turns import TurnText, check_agent_options, check_single_turn_options
from fathom.text.chat_renderer import ChatRenderer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedTask:
    """A task with the ids it is asked by."""

    task: Task
    """The task."""
    prompt_ids: np.ndarray
    """int32 [P]. Empty: an agent asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A run that can start."""

    config: RunConfig
    """Validated options."""
    model: StartingModel
    """What it starts from."""
    environment: AnyEnvironment
    """Tasks and grader, or tasks and episodes."""
    renderer: ChatRenderer
    """Messages to ids."""
    turns: TurnText | None
    """How conversations with agents are written and read. None: the tasks are single-turn."""
    train: tuple[PromptedTask, ...]
    """Tasks to train on."""
    held_out: tuple[PromptedTask, ...]
    """Tasks to evaluate on; empty without an evaluation."""
    left_out: tuple[str, ...]
    """Ids of tasks whose prompts are too long."""
    teachers: Assignment | None = None
    """Who teaches which task. None: nobody."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Renders tasks, and leaves out those that are too long."""

    renderer: ChatRenderer
    longest: int
    _: KW_ONLY
    asks: bool
    """False: an agent asks, and tasks need no prompt."""

    def of(self, tasks: Sequence[Task]) -> tuple[tuple[PromptedTask, ...], tuple[str, ...]]:
        """Those that fit, and the ids of the others."""
        if not self.asks:
            return tuple(PromptedTask(task=task, prompt_ids=np.empty(0, np.int32)) for task in tasks), ()
        kept: list[PromptedTask] = []
        left_out: list[str] = []
        for task in tasks:
            prompt_ids = self.renderer.render_prompt(task.messages)
            if len(prompt_ids) > self.longest:
                left_out.append(task.id)
            else:
                kept.append(PromptedTask(task=task, prompt_ids=prompt_ids))
        return tuple(kept), tuple(left_out)


def resolve(config: RunConfig, environment: AnyEnvironment | None = None) -> Resolved:
    """Check what the options refer to: packages, model, tasks, prompts, disk, port.

    Args:
        config: validated options.
        environment: given from Python instead of named by `task.kind`.

    Raises:
        ConfigError: the run cannot start; the message says what to change.
    """
    if config.adapters:
        raise ConfigError(
            "[adapters] trains several adapters, each a run of its own over one base: start it with fathom train, or "
            "with fathom.AdaptersRun in Python"
        )
    model = StartingModel.of(config.model)
    _check_model(config, model)
    check_lora(config.lora, config.name, model, config.engine)
    check_machine(config, model.size_bytes)
    if environment is None:
        environment = build_environment(config.task.kind, config.task.options)
    else:
        require_environment(environment, "given from Python")
    renderer = ChatRenderer(
        model.tokenizer, use_template=config.model.chat_template and model.tokenizer.template is not None
    )
    turns = None
    if isinstance(environment, AgentEnvironment):
        check_agent_options(config)
        turns = TurnText.of(model.tokenizer)
    else:
        check_single_turn_options(config)
    prompts = _Prompts(renderer, config.rollout.max_prompt_tokens, asks=turns is None)
    train, left_out = prompts.of(environment.tasks())
    if not train:
        raise ConfigError(
            f"all {len(left_out)} prompts are longer than rollout.max_prompt_tokens = "
            f"{config.rollout.max_prompt_tokens}; raise it, or choose shorter tasks"
        )
    _check_warm_start(config, environment, renderer, len(train))
    return Resolved(
        config=config,
        model=model,
        environment=environment,
        renderer=renderer,
        turns=turns,
        train=train,
        held_out=_held_out(config, environment, prompts),
        left_out=left_out,
        teachers=assign(config, model, (prompted.task.id for prompted in train)),
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
        f"publish every {clock.publish_every} steps over {config.sync.transport}; running generations: "
        f"{rollout.in_flight}",
    ]
    if config.lora is not None:
        kind = "alpha / sqrt(rank)" if config.lora.rslora else "alpha / rank"
        lines.insert(
            1,
            f"train an adapter of rank {config.lora.rank}, alpha {config.lora.alpha:g} ({kind}), on "
            f"{', '.join(config.lora.target_modules) or 'all linear layers'}; published: {config.lora.publish}",
        )
    if config.warm_start is not None:
        lines.insert(1, f"warm start: {config.warm_start.steps} supervised steps on {config.warm_start.tasks} tasks")
    if config.distillation is not None:
        names = ", ".join(config.distillation.teachers)
        beside = "beside the task's reward" if config.distillation.task_reward else "and from nothing else"
        lines.append(f"learn from {names} ({config.distillation.form}) {beside}")
    if config.evaluation is not None:
        lines.append(f"evaluate on {len(resolved.held_out)} held-out tasks, before and after")
    return lines


def _check_model(config: RunConfig, model: StartingModel) -> None:
    """What generation asks of the model."""
    if config.model.chat_template and model.folder is not None and model.tokenizer.template is None:
        raise ConfigError(
            f"model.path = {config.model.path!r} has no chat template; set model.chat_template = false to prompt with "
            "plain text"
        )
    sampling = config.rollout.sampling.params()
    if sampling.logit_bias is not None and sampling.logit_bias.ids[-1] >= model.vocab_size:
        raise ConfigError(
            f"rollout.sampling.logit_bias names token {sampling.logit_bias.ids[-1]}, but the model has "
            f"{model.vocab_size}; leave out ids beyond them"
        )
    largest = min(sampling.top_k or model.vocab_size, model.vocab_size)
    if sampling.truncates and largest > config.rollout.max_kept_ids:
        raise ConfigError(
            f"rollout.sampling may keep up to {largest} ids for one token, and each has to be recorded; set "
            f"rollout.sampling.top_k to at most {config.rollout.max_kept_ids}, or raise rollout.max_kept_ids"
        )
    if config.rollout.record_routes and not model.has_experts:
        raise ConfigError(
            "rollout.record_routes = true needs a model with experts, and this one is dense; turn it off, or choose "
            "another model"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > model.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds the {model.max_positions} "
            "positions of the model; lower one of them"
        )


def _check_warm_start(config: RunConfig, environment: AnyEnvironment, renderer: ChatRenderer, tasks: int) -> None:
    if config.warm_start is None:
        return
    if not isinstance(environment, DemonstratedEnvironment | DemonstratedAgentEnvironment):
        raise ConfigError(
            f"[warm_start] needs demonstrations, and task.kind = {config.task.kind!r} has none; remove it"
        )
    if config.warm_start.tasks > tasks:
        raise ConfigError(
            f"warm_start.tasks = {config.warm_start.tasks}, but there are only {tasks} training tasks that fit "
            "rollout.max_prompt_tokens; lower it"
        )
    renderer.end_id()  # refuses now a tokenizer that cannot end a demonstration


def _held_out(config: RunConfig, environment: AnyEnvironment, prompts: _Prompts) -> tuple[PromptedTask, ...]:
    if config.evaluation is None:
        return ()
    held_out, _ = prompts.of(environment.eval_tasks())
    if len(held_out) < config.evaluation.tasks:
        raise ConfigError(
            f"evaluation.tasks = {config.evaluation.tasks}, but the task set holds out only {len(held_out)} "
            "that fit rollout.max_prompt_tokens; lower it"
        )
    return held_out[: config.evaluation.tasks]
