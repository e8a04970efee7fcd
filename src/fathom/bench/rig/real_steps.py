"""The weights of consecutive optimizer steps, as a run makes them: sampled answers, rewards, GRPO, Adam.

Answers are sampled once, by the model that is trained; the steps train on them in turn. What a step changes depends on
the learning rate and on Adam's moments, so these are warm before the first version that is returned.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fathom.bench.rig.plain_loop import train_batch
from fathom.bench.rig.stand import PROMPT_TOKENS, Stand, open_stand
from fathom.config.families import Dtype
from fathom.config.objective import ObjectiveConfig
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import NoProgressError
from fathom.core.ids import GroupId, Occurrence
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.step import TrainBatch
from fathom.core.records.trajectory import Graded, Reward
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.rollout.episode import EpisodePlan
from fathom.run.rollouts.seeds import request_seed
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

_GROUPS, _GENERATIONS, _NEW_TOKENS = 4, 4, 24
_PACKED_TOKENS = 2048
_THREADS = 2
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    before: dict[str, Tensor]
    """The published cast before it."""
    after: dict[str, Tensor]
    """The published cast after it."""


def answers(model: Path, scratch: Path, dtype: Dtype, batches: int) -> list[TrainBatch]:
    """Batches of graded answers to small sums, sampled by `model`."""
    return asyncio.run(_answers(model, scratch, dtype, batches))


def cold_step(model: Path, dtype: Dtype, lr: float, batches: Sequence[TrainBatch]) -> Step:
    """The first step of all: without moments, Adam moves every element by the learning rate."""
    return _steps(model, dtype, lr, batches[:1], warm=0)[0]


def warm_steps(model: Path, dtype: Dtype, lr: float, batches: Sequence[TrainBatch], warm: int) -> list[Step]:
    """A step per batch, the first `warm` left out. Raises NoProgressError when a step changed nothing."""
    return _steps(model, dtype, lr, batches, warm)


def _steps(model: Path, dtype: Dtype, lr: float, batches: Sequence[TrainBatch], warm: int) -> list[Step]:
    config = TrainerConfig(
        steps=len(batches),
        groups_per_step=_GROUPS,
        dtype=dtype,
        threads=_THREADS,
        tokens_per_micro_batch=_PACKED_TOKENS,
        optimizer=OptimizerConfig(lr=lr),
    )
    torch.set_num_threads(_THREADS)
    backend = TorchBackend(model, config, aligned=False)
    trainer = Trainer(backend, config, ObjectiveConfig(), StalenessConfig(max_staleness=len(batches)))
    trainer.begin()
    steps: list[Step] = []
    before = _copy(backend) if warm == 0 else {}
    for number, batch in enumerate(batches, start=1):
        for outcome in trainer.steps(batch, trainer.version):
            if not outcome.stepped:
                raise NoProgressError(f"step {outcome.number} changed nothing: {outcome.why_not}")
        if number >= warm:
            after = _copy(backend)
            steps += [Step(before=before, after=after)] if before else []
            before = after
    return steps


def _copy(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


async def _answers(model: Path, scratch: Path, dtype: Dtype, batches: int) -> list[TrainBatch]:
    tasks = Arithmetic(ArithmeticOptions(num_train=batches * _GROUPS, num_eval=0)).tasks()
    async with open_stand(
        model,
        scratch,
        TrainerConfig(steps=1, groups_per_step=1, dtype=dtype),
        max_context_tokens=PROMPT_TOKENS + _NEW_TOKENS,
        max_running=32,
        engine_config=EngineConfig(threads=_THREADS),
    ) as stand:
        await stand.publish(0)
        runner = stand.runner(_grade, stop_ids=())
        plans = [_plans(stand, batch, tasks[batch * _GROUPS : (batch + 1) * _GROUPS]) for batch in range(batches)]
        return [
            train_batch(trajectories)
            for trajectories in await asyncio.gather(
                *(asyncio.gather(*(runner.run(plan) for plan in batch)) for batch in plans)
            )
        ]


def _plans(stand: Stand, batch: int, tasks: Sequence[Task]) -> list[EpisodePlan]:
    return [
        EpisodePlan(
            group=GroupId(f"{batch}/{place}"),
            member=member,
            occurrence=Occurrence(epoch=batch, index=place),
            attempt=0,
            task=task,
            prompt_ids=stand.renderer.render_prompt(task.messages),
            sampling=SamplingParams(),
            max_new_tokens=_NEW_TOKENS,
            seed=request_seed(batch, place, member, 0),
            priority=place,
            purpose=Purpose.ROLLOUT,
            pinned=None,
            barrier=None,
        )
        for place, task in enumerate(tasks)
        for member in range(_GENERATIONS)
    ]


async def _grade(task: Task, answer: str) -> Reward:
    """How near the first integer is; and a little for figures, so that no group is without a difference."""
    found = _INTEGER.search(answer)
    near = 0.0 if found is None else 1 / (1 + abs(int(found[0][:9]) - int(task.answer)))
    figures = sum(character.isdigit() for character in answer) / max(1, len(answer))
    return Graded(components={"near": near, "figures": 0.1 * figures}, grader="near/1", answer_found=found is not None)
