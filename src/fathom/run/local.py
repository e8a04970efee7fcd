"""Places a run on one machine: the trainer in this process, each engine in its own, graders and agents in theirs.

Importing this loads torch; whoever plays and grades must have been started before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fathom.buffer.books import Books
from fathom.buffer.clock import Clock
from fathom.buffer.group_buffer import GroupBuffer
from fathom.buffer.source import OccurrenceSource
from fathom.config.run import RunConfig
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError, RunStoppedError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine
from fathom.core.ports.environment import ComparingEnvironment, DemonstratedEnvironment
from fathom.core.records.demonstration import Demonstration
from fathom.envs.agents.processes import AgentProcesses
from fathom.ledger.events import RunEnded, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.model.language_model import LanguageModel
from fathom.rollout.agent_episode import AgentEpisodeRunner
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.registry import LAUNCHERS, Launcher
from fathom.rollout.episode import EpisodeRunner
from fathom.rollout.group_grading import GroupGrading
from fathom.run.history.checkpoint import Checkpoints, LoopState
from fathom.run.history.folder import RunFolder
from fathom.run.history.opening import open_history
from fathom.run.history.past import evaluated_last
from fathom.run.history.recorder import Observer, Recorder
from fathom.run.history.trackers import SINKS, TrackerFeed
from fathom.run.learner import Learner
from fathom.run.parts import Parts, Runner
from fathom.run.pipeline import Pipeline
from fathom.run.preflight import access_token, check_engine
from fathom.run.resolve import Resolved
from fathom.run.rollouts.agents import agent_runner
from fathom.run.rollouts.demonstrating import played_demonstrations
from fathom.run.rollouts.evaluation import Evaluator
from fathom.run.rollouts.of_adapter import OfAdapter
from fathom.run.rollouts.overlong import shaping
from fathom.run.rollouts.players import Players
from fathom.run.starting_weights import require_devices, starting_weights
from fathom.run.stop import Stop
from fathom.run.teachers.opening import open_teachers
from fathom.run.teachers.teaching import Teaching
from fathom.run.weights.adapters import adapter_start, merges, served_form
from fathom.run.weights.delivery import Delivery
from fathom.run.weights.desk import Desk
from fathom.run.weights.fleet import Fleet
from fathom.run.weights.keeping import open_transport
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a run has in common with others that train adapters over the same base."""

    model_folder: Path
    """The base."""
    learner: Learner
    """Trains this run's adapter."""
    launcher: Launcher
    """Gives out this run's engines."""


async def drive(
    resolved: Resolved,
    folder: RunFolder,
    players: Players,
    stop: Stop,
    observers: tuple[Observer, ...],
    launcher: Launcher | None = None,
    shared: Shared | None = None,
) -> str:
    """Open an incarnation of the run in `folder`, go on from its newest checkpoint or from the start, run to the end.

    `launcher` starts engines in place of the one that `engine.kind` names. `shared`: None, the run is alone.

    Returns how it ended: `steps`, `data` or `stopped`. An error is recorded and raised.

    Raises:
        ConfigError: the device is not there.
        CheckpointError: the newest checkpoint cannot be read.
    """
    config = resolved.config
    checkpoints = Checkpoints(folder.checkpoints, LoopState, keep=config.checkpoint.keep, fsync=config.ledger.fsync)
    newest = checkpoints.newest()
    require_devices({"trainer.device": config.trainer.device, "engine.device": config.engine.device})
    state = newest[0] if newest else None
    recorder = open_history(
        config,
        folder,
        observers,
        parent_seq=state.ledger_seq if state else None,
        start_step=state.step if state else 0,
    )
    sinks = [SINKS[tracker] for tracker in config.trackers]
    feeds = [TrackerFeed(folder.ledger, partial(sink, folder.path, recorder.incarnation)) for sink in sinks]
    try:
        reason = await _run(resolved, folder, players, stop, recorder, checkpoints, newest, launcher, shared)
    except BaseException as error:
        recorder.record(RunEnded(reason=f"{type(error).__name__}: {error}", step=checkpoints.newest_step))
        raise
    else:
        recorder.record(RunEnded(reason=reason, step=checkpoints.newest_step))
        return reason
    finally:
        recorder.close()
        for feed in feeds:
            feed.close()


async def _run(
    resolved: Resolved,
    folder: RunFolder,
    players: Players,
    stop: Stop,
    recorder: Recorder,
    checkpoints: Checkpoints,
    newest: tuple[LoopState, Path] | None,
    launcher: Launcher | None,
    shared: Shared | None,
) -> str:
    config = resolved.config
    if shared is None:
        model_folder = starting_weights(resolved.model, config.model.tiny, config.seed, folder)
        learner = await Learner.start(partial(load_trainer, config, model_folder), stop, merges=merges(config))
        fleet = _fleet(config, folder, model_folder, recorder, launcher)
    else:
        model_folder, learner = shared.model_folder, shared.learner
        folder.keep_tokenizer(model_folder)
        fleet = _fleet(config, folder, model_folder, recorder, shared.launcher)
    delivery = Delivery(config, recorder.incarnation, learner, fleet, recorder, vocab_size=resolved.model.vocab_size)
    buffer = _buffer(resolved, recorder.incarnation)
    try:
        async with stop.cancels():
            await fleet.start()
            if newest is None:
                await _begin(resolved, players, learner, recorder)
            else:
                await _go_on(newest, folder, learner, buffer, recorder)
        async with (
            _runner(resolved, players, fleet, recorder.incarnation, learner.adapter) as runner,
            _taught(resolved, runner, fleet, folder, recorder, launcher) as taught,
        ):
            pipeline = Pipeline(
                Parts(
                    config=config,
                    fresh=newest is None,
                    evaluated=evaluated_last(folder),
                    tasks=resolved.train,
                    buffer=buffer,
                    runner=shaping(taught, config.objective),
                    learner=learner,
                    delivery=delivery,
                    fleet=fleet,
                    desk=Desk(fleet, folder.path),
                    recorder=recorder,
                    checkpoints=checkpoints,
                    evaluator=_evaluator(resolved, runner, stop, fleet),
                    stop=stop,
                )
            )
            return await pipeline.run()
    except RunStoppedError:
        return "stopped"
    finally:
        await delivery.close()
        learner.close()
        await fleet.close()


@asynccontextmanager
async def _runner(
    resolved: Resolved, players: Players, fleet: Fleet, incarnation: int, adapter: AdapterIdentity | None
) -> AsyncGenerator[Runner]:
    """Plays episodes, and writes into them which adapter was active."""
    async with _compared(resolved, players, fleet, incarnation) as runner:
        yield runner if adapter is None else OfAdapter(runner, adapter)


@asynccontextmanager
async def _compared(resolved: Resolved, players: Players, fleet: Fleet, incarnation: int) -> AsyncGenerator[Runner]:
    """Plays episodes of the task's kind; together, where members of a group are compared."""
    config = resolved.config
    async with _episodes(resolved, players, fleet, incarnation) as episodes:
        if not isinstance(resolved.environment, ComparingEnvironment):
            yield episodes
            return
        yield GroupGrading(
            play=episodes.play,
            compare=players.grade_group,
            group_size=config.rollout.group_size,
            min_graded=config.staleness.min_graded or config.rollout.group_size,
        )


@asynccontextmanager
async def _taught(
    resolved: Resolved, runner: Runner, fleet: Fleet, folder: RunFolder, recorder: Recorder, launcher: Launcher | None
) -> AsyncGenerator[Runner]:
    """The runner of what is trained: what it plays is scored by teachers, if there are any."""
    config, assignment = resolved.config, resolved.teachers
    if config.distillation is None or assignment is None:
        yield runner
        return
    async with open_teachers(assignment, config, folder, recorder, launcher) as teachers:
        yield Teaching(
            runner,
            config.distillation,
            teachers,
            assignment.by_task,
            fleet.score,
            recorder,
            vocab_size=resolved.model.vocab_size,
        )


@asynccontextmanager
async def _episodes(
    resolved: Resolved, players: Players, fleet: Fleet, incarnation: int
) -> AsyncGenerator[EpisodeRunner | AgentEpisodeRunner]:
    config, identity = resolved.config, resolved.renderer.identity
    if isinstance(players, AgentProcesses):
        assert resolved.turns is not None, "found when the run was resolved"
        router = fleet.router
        async with agent_runner(
            config,
            resolved.turns,
            players,
            router.generate,
            router.forget,
            identity,
            record_routes=config.rollout.record_routes,
            incarnation=incarnation,
        ) as runner:
            yield runner
        return
    yield EpisodeRunner(
        router=fleet.router,
        decode=resolved.model.tokenizer.decode,
        grade=players.grade,
        stop_ids=resolved.model.tokenizer.special.stop_ids,
        stop_strings=config.rollout.stop_strings,
        tokenizer=identity,
        record_routes=config.rollout.record_routes,
    )


async def _begin(resolved: Resolved, players: Players, learner: Learner, recorder: Recorder) -> None:
    """A fresh run: the warm start if there is one, then version 0."""
    config = resolved.config
    if config.warm_start is not None:
        demonstrations = await _demonstrations(resolved, players, config.warm_start.tasks, recorder)
        steps = learner.warm_start(
            demonstrations, config.warm_start, config.trainer.tokens_per_micro_batch, config.seed
        )
        async for step in steps:
            recorder.record(WarmStartStepped(step=step.step, loss=step.loss, tokens=step.tokens))
        recorder.commit()
    await learner.begin()


async def _go_on(
    newest: tuple[LoopState, Path], folder: RunFolder, learner: Learner, buffer: GroupBuffer, recorder: Recorder
) -> None:
    """A resumed run: weights, optimizer, data cursor, books and waiting groups as they were."""
    state, trainer_folder = newest
    await learner.load(trainer_folder)
    with LedgerReader(folder.ledger) as reader:
        recorder.record(*buffer.restore(state.buffer, lambda name: reader.trajectory(name).trajectory))


async def _demonstrations(resolved: Resolved, players: Players, count: int, recorder: Recorder) -> list[Demonstration]:
    environment = resolved.environment
    if isinstance(players, AgentProcesses):
        return await played_demonstrations(resolved, players, count, recorder)
    assert isinstance(environment, DemonstratedEnvironment), "checked when the run was resolved"
    return [
        resolved.renderer.render_demonstration(
            prompted.task.messages, environment.demonstration(prompted.task), source=prompted.task.id
        )
        for prompted in resolved.train[:count]
    ]


def load_trainer(
    config: RunConfig, model_folder: Path, model: LanguageModel | None = None
) -> tuple[Trainer, TorchBackend]:
    """The trainer of a run. `model`: the base in memory, to be adapted; None: it is loaded. Raises ConfigError."""
    start = adapter_start(config.lora, config.name, config.seed, config.model.path)
    backend = TorchBackend(model_folder, config.trainer, aligned=config.model.aligned, adapter=start, model=model)
    return Trainer(backend, config.trainer, config.objective, config.staleness, config.distillation), backend


def _fleet(
    config: RunConfig, folder: RunFolder, model_folder: Path, recorder: Recorder, launcher: Launcher | None
) -> Fleet:
    start = launcher or LAUNCHERS[config.engine.kind](config.engine)

    async def launch(name: EngineId) -> Engine:
        engine = await start(
            EmbeddedSpec(
                engine=name,
                model_folder=model_folder,
                log_path=folder.logs / f"{name}.log",
                max_context_tokens=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
                max_running=config.engine.max_running,
                step_tokens=config.engine.step_tokens,
                kv_memory_mb=config.engine.kv_memory_mb,
                dtype=config.trainer.dtype,
                device=config.engine.device,
                threads=config.engine.threads,
                adapter=served_form(config),
                aligned=config.model.aligned,
                speculation=config.engine.speculation,
                draft_tokens=config.engine.draft_tokens,
                draft_model_folder=None if config.engine.draft_model is None else Path(config.engine.draft_model),
                host=config.engine.host,
                port=config.engine.port,
                token=access_token(config.engine),
                start_timeout_s=config.engine.start_timeout_s,
                weights_timeout_s=config.sync.timeout_s,
                request_timeout_s=config.rollout.request_timeout_s,
            )
        )
        try:
            check_engine(config, engine.capabilities)
        except ConfigError:
            await engine.close()
            raise
        return engine

    transport, keeper = open_transport(folder.path, model_folder, config.sync, recorder)
    return Fleet(
        config.engine.count,
        launch,
        transport,
        config.sync,
        recorder,
        health_s=config.engine.health_timeout_s,
        keeper=keeper,
        request_s=config.rollout.request_timeout_s,
    )


def _buffer(resolved: Resolved, incarnation: int) -> GroupBuffer:
    config = resolved.config
    return GroupBuffer(
        clock=Clock(
            groups_per_step=config.trainer.groups_per_step,
            steps_on_a_batch=config.trainer.steps_on_a_batch,
            staleness=config.staleness,
        ),
        books=Books(),
        source=OccurrenceSource(
            num_tasks=len(resolved.train),
            seed=config.seed,
            shuffle=config.task.shuffle,
            epochs=config.task.epochs,
        ),
        staleness=config.staleness,
        objective=config.objective,
        group_size=config.rollout.group_size,
        incarnation=incarnation,
    )


def _evaluator(resolved: Resolved, runner: Runner, stop: Stop, fleet: Fleet) -> Evaluator | None:
    config = resolved.config
    if config.evaluation is None:
        return None
    return Evaluator(
        config.evaluation,
        runner.run,
        [(prompted.task, prompted.prompt_ids) for prompted in resolved.held_out],
        max_new_tokens=config.rollout.max_new_tokens,
        concurrency=config.rollout.max_in_flight,
        seed=config.seed,
        stop=stop,
        recover=fleet.recovered,
    )
