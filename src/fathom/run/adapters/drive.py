"""Places a run of several adapters on one machine: one base in the trainer's thread, one in each engine's process.

    adapter a: buffer, clock, books, ledger, trainer a --+                    +-- engine-0: base, adapter a, adapter b
                                                         +-- thread: base     |
    adapter b: buffer, clock, books, ledger, trainer b --+                    +-- engine-1: base, adapter a, adapter b

Each adapter is driven as a run by itself, in the same event loop. Importing this loads torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fathom.config.run import RunConfig
from fathom.core.adapter import AdapterForm
from fathom.core.errors import ConfigError
from fathom.model.language_model import LanguageModel
from fathom.rollout.engines.embedded.shared_processes import SharedProcesses
from fathom.run.history.folder import RunFolder
from fathom.run.history.recorder import Observer
from fathom.run.learner import Learner
from fathom.run.local import Shared, drive, load_trainer
from fathom.run.resolve import Resolved
from fathom.run.rollouts.players import Players
from fathom.run.starting_weights import require_devices, starting_weights
from fathom.run.stop import Stop
from fathom.run.weights.adapters import served_form
from fathom.trainer.backends.torch_backend import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One adapter, about to be driven."""

    resolved: Resolved
    """Its run."""
    folder: RunFolder
    """Where that is kept, locked."""
    players: Players
    """Started."""
    observers: tuple[Observer, ...]
    """See each of its events."""


async def drive_each(config: RunConfig, folder: RunFolder, lanes: Mapping[str, Lane], stop: Stop) -> dict[str, str]:
    """Drive every adapter to its end, all at once; how each ended. See `drive`.

    When one fails the others are asked to end, and go on from there when the run is resumed.

    Raises:
        ConfigError: an adapter does not fit the base; no history was begun.
        FathomError: what the first one that failed raised, after the others have ended.
    """
    require_devices({"trainer.device": config.trainer.device, "engine.device": config.engine.device})
    model = next(iter(lanes.values())).resolved.model
    model_folder = starting_weights(model, config.model.tiny, config.seed, folder)
    processes = SharedProcesses(
        [_form(lane) for lane in lanes.values()], folder.logs, max(_longest(lane) for lane in lanes.values())
    )
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    failures: list[BaseException] = []

    async def one(lane: Lane, learner: Learner) -> str:
        shared = Shared(model_folder=model_folder, learner=learner, launcher=processes.launch)
        try:
            return await drive(lane.resolved, lane.folder, lane.players, stop, lane.observers, shared=shared)
        except BaseException as error:
            failures.append(error)
            stop.ask()
            raise

    try:
        load = asyncio.get_running_loop().run_in_executor(thread, _load, lanes, model_folder, stop, thread)
        learners = await load
        ended = await asyncio.gather(*(one(lanes[name], learners[name]) for name in lanes), return_exceptions=True)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
    if failures:
        raise failures[0]
    return dict(zip(lanes, map(str, ended), strict=True))


def _load(lanes: Mapping[str, Lane], model_folder: Path, stop: Stop, thread: ThreadPoolExecutor) -> dict[str, Learner]:
    """The trainer of each adapter, over one base in memory. Runs in `thread`."""
    options = next(iter(lanes.values())).resolved.config.trainer
    models = LanguageModel.load_over_one_base(model_folder, TORCH_DTYPES[options.dtype], options.device, len(lanes))
    learners: dict[str, Learner] = {}
    for (name, lane), model in zip(lanes.items(), models, strict=True):
        try:
            trainer, backend = load_trainer(lane.resolved.config, model_folder, model)
        except ConfigError as error:
            raise ConfigError(f"[adapters.{name}]: {error}") from error
        learners[name] = Learner.beside(trainer, backend, stop, thread)
    return learners


def _form(lane: Lane) -> AdapterForm:
    form = served_form(lane.resolved.config)
    assert form is not None, "checked when the run was resolved"
    return form


def _longest(lane: Lane) -> int:
    rollout = lane.resolved.config.rollout
    return rollout.max_prompt_tokens + rollout.max_new_tokens
