"""The root of the tree, and the rules between its sections."""

from __future__ import annotations

from typing import Self

from pydantic import Field, JsonValue, model_validator

from fathom.config.agent import LimitsConfig
from fathom.config.distillation import DistillationConfig
from fathom.config.families import EngineKind, FabricKind, LoraPublish, OnStale, Tracker, TransportKind
from fathom.config.lora import AdapterConfig, AdapterName, LoraConfig
from fathom.config.objective import ObjectiveConfig, check_run
from fathom.config.rollout import EngineConfig, RolloutConfig
from fathom.config.section import Section
from fathom.config.sync import SyncConfig
from fathom.config.trainer import CheckpointConfig, StalenessConfig, TrainerConfig, WarmStartConfig
from fathom.core.records.sampling import InFlightMode


class ModelConfig(Section):
    """The policy to start from: a folder, or a tiny model made from the run's seed."""

    path: str | None = None
    """Hugging Face folder (model and tokenizer), or a hub id where a hub is reached. None: a tiny model."""
    tiny: str | None = Field(default=None, pattern="^(arithmetic|moe|terminal)$")
    """Name of a tiny model made from the seed, with its own tokenizer; `terminal` has a chat template too. None: `path`
    is used."""
    chat_template: bool = True
    """Render prompts by the tokenizer's chat template. False: the messages' contents joined as plain text."""
    aligned: bool = False
    """Engine and trainer compute the same bits: the log-ratio of a token of the trainer's own version is 0, exactly.
    Checked at start and at every publication; refused where it does not hold."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("set exactly one of path and tiny")
        return self


class TaskConfig(Section):
    """What is trained on."""

    kind: str
    """A built-in task family, or `package.module:ClassName` of one's own."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options, validated by the task's own model."""
    shuffle: bool = True
    """Draw tasks in a seeded order that differs from epoch to epoch."""
    epochs: int | None = Field(default=None, gt=0)
    """Passes over the tasks at most. None: as many as the steps need."""
    grader_workers: int = Field(default=1, gt=0, le=256)
    """Processes that grade."""
    grade_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one grading; after it the worker is killed and the trajectory is ungraded."""
    limits: LimitsConfig | None = None
    """Of tasks in which an agent acts only. None: the defaults."""


class EvalConfig(Section):
    """Evaluation during the run, each time at one pinned version."""

    every_steps: int | None = Field(default=None, gt=0)
    """Steps between evaluations during the run. None: only before and after."""
    tasks: int = Field(default=100, gt=0)
    """Held-out tasks."""
    samples: int = Field(default=1, gt=0)
    """Samples per task."""
    pass_at: int = Field(default=1, gt=0)
    """k of pass@k; at most `samples`."""
    temperature: float = Field(default=1.0, gt=0)
    """Its own sampling temperature."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pass_at > self.samples:
            raise ValueError(f"pass_at {self.pass_at} needs at least as many samples, got {self.samples}")
        return self


class LedgerConfig(Section):
    """The history of the run."""

    fsync: bool = False
    """True: reported steps survive power loss too, at the price of a flush each."""


class RunConfig(Section):
    """One run."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Its name; the run's folder is `runs_dir/name-...`."""
    runs_dir: str = Field(default="runs", pattern=r"^[^\x00]+$")
    """Where runs are kept."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random."""
    deterministic: bool = False
    """Bit for bit the same on the same machine class; needs max_staleness = 0."""
    model: ModelConfig
    """The policy."""
    task: TaskConfig
    """The tasks."""
    rollout: RolloutConfig
    """Generation."""
    engine: EngineConfig = EngineConfig()
    """The engine."""
    staleness: StalenessConfig = StalenessConfig()
    """The clock."""
    trainer: TrainerConfig
    """Training."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    distillation: DistillationConfig | None = None
    """Teachers. None: none."""
    sync: SyncConfig = SyncConfig()
    """Weights on the move."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole model. None: the whole model."""
    adapters: dict[AdapterName, AdapterConfig] = Field(default_factory=dict)
    """Several adapters over one base, as `[adapters.NAME]`. Empty: one is trained, or the whole model."""
    warm_start: WarmStartConfig | None = None
    """Supervised phase before RL. None: none."""
    evaluation: EvalConfig | None = None
    """Evaluation. None: none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    ledger: LedgerConfig = LedgerConfig()
    """History."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers fed from the ledger."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        clock, trainer, rollout = self.staleness, self.trainer, self.rollout
        smallest = trainer.steps_on_a_batch - 1 + clock.publish_every - 1
        if clock.max_staleness < smallest:
            raise ValueError(
                f"staleness.max_staleness = {clock.max_staleness} is impossible with trainer.steps_on_a_batch = "
                f"{trainer.steps_on_a_batch} and staleness.publish_every = {clock.publish_every}: "
                f"the smallest possible value is {smallest}"
            )
        if clock.kv_bound < smallest:
            raise ValueError(
                f"staleness.max_kv_staleness = {clock.kv_bound}: the smallest possible value is {smallest}"
            )
        if self.model.aligned:
            _check_aligned(self)
        if self.deterministic and clock.max_staleness != 0:
            raise ValueError("deterministic = true needs staleness.max_staleness = 0")
        if self.deterministic and self.engine.count > 1:
            raise ValueError(
                f"deterministic = true uses one engine, but engine.count = {self.engine.count}; set engine.count = 1"
            )
        if self.sync.p2p is not None and self.sync.p2p.fabric is FabricKind.MEMORY:
            raise ValueError(
                "sync.p2p.fabric = 'memory' stays within one process, but engines are processes of their own; "
                "set sync.p2p.fabric = 'nixl'"
            )
        if self.sync.transport is TransportKind.P2P and self.engine.kind is EngineKind.VLLM:
            raise ValueError(
                "engine.kind = 'vllm' lets nobody write into its memory, as sync.transport = 'p2p' does; set "
                "sync.transport = 'broadcast', or 'shared' where trainer and engine are on one host"
            )
        window = clock.max_staleness + clock.publish_every
        if self.sync.chain.keep_steps < window:
            chain = self.sync.chain.model_copy(update={"keep_steps": window})
            object.__setattr__(self, "sync", self.sync.model_copy(update={"chain": chain}))
        if self.sync.min_engines > self.engine.count:
            raise ValueError(
                f"sync.min_engines = {self.sync.min_engines} is more than engine.count = {self.engine.count}; "
                "lower it, or raise engine.count"
            )
        if clock.max_staleness == 0 and rollout.in_flight is not InFlightMode.DRAIN:
            if "in_flight" in rollout.model_fields_set:
                raise ValueError("staleness.max_staleness = 0 implies rollout.in_flight = 'drain'; remove the option")
            object.__setattr__(self, "rollout", rollout.model_copy(update={"in_flight": InFlightMode.DRAIN}))
        if clock.min_graded is not None and clock.min_graded > rollout.group_size:
            raise ValueError(
                f"staleness.min_graded = {clock.min_graded} is more than rollout.group_size = {rollout.group_size}"
            )
        if trainer.steps % trainer.steps_on_a_batch:
            raise ValueError("trainer.steps must be a multiple of trainer.steps_on_a_batch")
        if rollout.max_in_flight < rollout.group_size:
            raise ValueError(
                f"rollout.max_in_flight = {rollout.max_in_flight} is less than one group "
                f"(rollout.group_size = {rollout.group_size})"
            )
        if clock.max_staleness == 0 and clock.on_stale is not OnStale.WAIT:
            raise ValueError(f"staleness.on_stale = '{clock.on_stale}' changes nothing at max_staleness = 0; remove it")
        if trainer.replay_routes and not rollout.record_routes:
            raise ValueError("trainer.replay_routes = true needs the engine's routes: set rollout.record_routes = true")
        check_run(
            self.objective,
            group_size=rollout.group_size,
            steps_on_a_batch=trainer.steps_on_a_batch,
            critic=trainer.critic is not None,
            rewarded=self.distillation is None or self.distillation.task_reward,
        )
        if "reference" in trainer.model_fields_set and not self.objective.reference:
            raise ValueError("[trainer.reference] changes nothing while objective.kl_coefficient = 0; remove it")
        if self.distillation is not None:
            _check_distillation(self.distillation, self.objective)
        if self.engine.dtype is not None and self.engine.dtype is not trainer.dtype:
            raise ValueError(
                f"engine.dtype = '{self.engine.dtype}' differs from the published cast, trainer.dtype = "
                f"'{trainer.dtype}'; set them equal"
            )
        return self


def _check_distillation(distillation: DistillationConfig, objective: ObjectiveConfig) -> None:
    if not distillation.task_reward and objective.filter_zero_variance:
        raise ValueError(
            "objective.filter_zero_variance = true leaves out groups by their rewards, and distillation.task_reward = "
            "false does not train on rewards; remove the one, or set the other to true"
        )


def _check_aligned(config: RunConfig) -> None:
    if config.sync.gap_rows == 0:
        raise ValueError(
            "model.aligned = true is checked on recorded rows at every publication, but sync.gap_rows = 0; raise it"
        )
    if config.engine.kind is not EngineKind.EMBEDDED:
        raise ValueError(
            f"model.aligned = true needs engine.kind = 'embedded', not '{config.engine.kind}' with other kernels; "
            "set model.aligned = false"
        )
    if config.lora is not None and config.lora.publish is LoraPublish.MERGED:
        raise ValueError(
            "model.aligned = true needs the trainer's own function in the engine, but lora.publish = 'merged' rounds "
            "it; set lora.publish = 'adapter'"
        )
    for option, device in (("engine.device", config.engine.device), ("trainer.device", config.trainer.device)):
        if device != "cpu":
            raise ValueError(
                f"model.aligned = true holds on CPUs only, but {option} = '{device}'; set model.aligned = false"
            )
