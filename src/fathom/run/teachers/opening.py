"""Starts the teachers of a run. Importing this loads torch."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fathom.config.families import Dtype, EngineKind
from fathom.config.rollout import EngineConfig
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine
from fathom.core.records.row import row_of_text
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.registry import LAUNCHERS, Launcher
from fathom.run.history.folder import RunFolder
from fathom.run.history.recorder import Recorder
from fathom.run.teachers.assignment import Assignment, TeacherModel, ids_at_most
from fathom.run.teachers.teacher import Teacher
from fathom.run.weights.member import Launch
from fathom.sync.probe import TOLERANCES, Probe
from fathom.text.tiny_tokenizers import TINY_TOKENIZERS

_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


@asynccontextmanager
async def open_teachers(
    assignment: Assignment | None,
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    launcher: Launcher | None = None,
) -> AsyncGenerator[Mapping[str, Teacher]]:
    """The teachers by name, as long as it is open. `launcher` starts engines in place of those that `kind` names.

    Raises:
        ConfigError: an engine cannot score what is asked.
        EngineError | DeliveryError | PayloadError: one cannot start, or does not hold its weights.
    """
    teachers: dict[str, Teacher] = {}
    async with AsyncExitStack() as closing:
        for name, model in (assignment.teachers if assignment is not None else {}).items():
            path = model.model.folder or _made_tiny(name, model, config.seed, folder)
            launch = _launcher(name, model, path, config, folder, launcher)
            teacher = Teacher(name, launch, folder.path, recorder, health_s=config.engine.health_timeout_s)
            closing.push_async_callback(teacher.close)
            await teacher.start(*await _weights(model, path, config))
            teachers[name] = teacher
        yield teachers


def _launcher(
    name: str, model: TeacherModel, path: Path, config: RunConfig, folder: RunFolder, launcher: Launcher | None
) -> Launch:
    assert config.distillation is not None, "there are teachers"
    own, timeout_s = model.config, config.distillation.timeout_s
    start = launcher or LAUNCHERS[own.kind](EngineConfig(kind=own.kind))

    async def launch(engine_id: EngineId) -> Engine:
        engine = await start(
            EmbeddedSpec(
                engine=engine_id,
                model_folder=path,
                log_path=folder.logs / f"{engine_id}.log",
                max_context_tokens=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
                max_running=1,
                dtype=config.trainer.dtype,
                device=own.device,
                threads=own.threads,
                start_timeout_s=config.engine.start_timeout_s,
                weights_timeout_s=config.sync.timeout_s,
                request_timeout_s=timeout_s,
            )
        )
        try:
            _check(name, config, model, engine)
        except ConfigError:
            await engine.close()
            raise
        return engine

    return launch


def _check(name: str, config: RunConfig, model: TeacherModel, engine: Engine) -> None:
    """What the teacher's engine must be able to do."""
    assert config.distillation is not None, "there are teachers"
    able, sampling = engine.capabilities, config.rollout.sampling.params()
    asked = ids_at_most(config.distillation, model.model.vocab_size) > 0
    needs = (
        (able.ids_scored or not asked, f"distillation.form = '{config.distillation.form}' (`ids_scored`)"),
        (able.kept_sets or not sampling.truncates, "rollout.sampling.top_k, top_p or min_p (`kept_sets`)"),
        (able.logit_bias or sampling.logit_bias is None, "rollout.sampling.logit_bias (`logit_bias`)"),
        ("shared" in able.transports, "weights by shared memory (`transports`)"),
    )
    if lacking := [option for met, option in needs if not met]:
        raise ConfigError(
            f"distillation.teachers.{name}: its engine (kind = '{model.config.kind}') lacks what is asked: "
            f"{'; '.join(lacking)}; change these options, or its kind"
        )


async def _weights(model: TeacherModel, path: Path, config: RunConfig) -> tuple[Mapping[str, Tensor], Probe | None]:
    """The teacher's weights in the run's element type, and what it must answer if its engine cannot digest them."""
    dtype = config.trainer.dtype
    loaded = await asyncio.to_thread(LanguageModel.load, path, _DTYPES[dtype], "cpu")
    if model.config.kind is not EngineKind.VLLM:
        return loaded.weights(), None
    probe = await Probe.prepare(
        partial(_text_logprobs, loaded),
        vocab_size=model.model.vocab_size,
        longest=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        tolerance=config.sync.probe_tolerance or TOLERANCES[dtype],
    )
    return loaded.weights(), probe


async def _text_logprobs(model: LanguageModel, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [await asyncio.to_thread(_score, model, text) for text in texts]


def _score(model: LanguageModel, text: np.ndarray) -> np.ndarray:
    row = row_of_text(text)
    with torch.no_grad():
        ids = torch.from_numpy(text.astype(np.int64))
        hidden = model.hidden(ids, torch.arange(len(text)), PackedAttention([len(text)]))
        temperature = torch.from_numpy(row.temperature)
        return head_outputs(model, hidden[row.positions - 1], ids[row.positions], temperature, None).logprobs.numpy()


def _made_tiny(name: str, model: TeacherModel, seed: int, folder: RunFolder) -> Path:
    """A tiny teacher, made once."""
    path = folder.path / "teachers" / name
    if not path.is_dir():
        unfinished = path.with_name(f".unfinished-{name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tiny = model.config.tiny or ""
        TINY_TOKENIZERS[tiny](unfinished)
        make_tiny(tiny, seed, unfinished)
        unfinished.rename(path)
    return path
