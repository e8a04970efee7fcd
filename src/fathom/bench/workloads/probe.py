"""Engine against trainer on one version: how far apart are their log-probabilities of the same tokens?

Every token is sampled by a real engine process and scored by the trainer, as in a run; nothing is re-tokenised and
no version changes, so all that is left is the difference between two stacks of kernels.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fathom.bench.options import ProbeOptions
from fathom.bench.record import Measured, Sample, Say, Target
from fathom.bench.rig.stand import PROMPT_TOKENS, Stand, open_stand, tiny_model
from fathom.config.families import Dtype
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import TrainerConfig
from fathom.core.errors import EngineError
from fathom.core.ids import GroupId, Occurrence
from fathom.core.ports.environment import Task
from fathom.core.records.row import Row, rows_of
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import Reward, TrajectoryStatus, Ungraded
from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.rollout.episode import EpisodePlan
from fathom.run.rollouts.seeds import request_seed

SETTINGS: dict[str, SamplingParams] = {
    "temperature 1.0": SamplingParams(),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1.3": SamplingParams(temperature=1.3),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 20": SamplingParams(top_k=20),
}
SMALL_MAX = 1e-5
"""Bound on every |log r| of a small model."""
LARGE_MEAN, LARGE_MAX = 1e-5, 2e-4
"""Bounds for a model of a hundred million parameters and more."""
_SMALL_PARAMETERS = 10_000_000


def probe(options: ProbeOptions, say: Say) -> Measured:
    """Measure |log r| of every setting. Raises ConfigError or EngineError when it cannot."""
    with tempfile.TemporaryDirectory(prefix="fathom-probe-") as scratch:
        model = Path(options.model) if options.model else tiny_model(Path(scratch) / "model", options.seed)
        return asyncio.run(_probe(options, model, Path(scratch), say))


async def _probe(options: ProbeOptions, model: Path, scratch: Path, say: Say) -> Measured:
    trainer = TrainerConfig(steps=1, groups_per_step=1, threads=options.threads, dtype=options.dtype)
    say(f"starting an engine with {model}")
    async with open_stand(
        model,
        scratch,
        trainer,
        max_context_tokens=PROMPT_TOKENS + options.max_new_tokens,
        max_running=options.requests,
        engine_config=EngineConfig(threads=options.threads),
        aligned=options.aligned,
    ) as stand:
        await stand.publish(0)
        gaps: dict[str, np.ndarray] = {}
        for setting, sampling in SETTINGS.items():
            rows = await _sample(options, stand, sampling)
            gaps[setting] = _gaps(stand, rows)
            say(f"{setting}: {len(gaps[setting])} tokens, max |log r| {gaps[setting].max():.2e}")
        small = sum(tensor.numel() for tensor in stand.backend.weights().values()) <= _SMALL_PARAMETERS
    return Measured(samples=_samples(gaps), targets=list(_targets(options, gaps, small)))


async def _sample(options: ProbeOptions, stand: Stand, sampling: SamplingParams) -> list[Row]:
    """Rows with at least `options.tokens` sampled tokens, many requests at a time."""
    tasks = Arithmetic(ArithmeticOptions(seed=options.seed)).tasks()
    runner = stand.runner(_no_grade, stand.tokenizer.special.stop_ids)
    rows: list[Row] = []
    for wave in range(options.tokens):  # each wave that counts adds a token at least
        places = range(wave * options.requests, (wave + 1) * options.requests)
        plans = [_plan(options, stand, tasks[place % len(tasks)], place, sampling) for place in places]
        ended = await asyncio.gather(*(runner.run(plan) for plan in plans))
        for trajectory in ended:
            if trajectory.header.status in (TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED):
                raise EngineError(stand.engine.id, f"a request of the probe failed: {trajectory.header.cause}")
            rows += rows_of(trajectory)
        if sum(len(row.positions) for row in rows) >= options.tokens:
            break
    return rows


def _plan(options: ProbeOptions, stand: Stand, task: Task, place: int, sampling: SamplingParams) -> EpisodePlan:
    occurrence = Occurrence(epoch=0, index=place)
    return EpisodePlan(
        group=GroupId(f"probe/{sampling}/{occurrence.name}"),
        member=0,
        occurrence=occurrence,
        attempt=0,
        task=task,
        prompt_ids=stand.renderer.render_prompt(task.messages),
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        seed=request_seed(options.seed, place, 0, 0),
        priority=place,
        purpose=Purpose.PROBE,
        pinned=None,
        barrier=None,
    )


async def _no_grade(task: Task, answer: str) -> Reward:
    return Ungraded(cause="probe", detail="a probe is not graded")


def _gaps(stand: Stand, rows: Sequence[Row]) -> np.ndarray:
    """float64 [N]: |log r| of every sampled token."""
    trained = np.concatenate(stand.trainer.logprobs(rows)).astype(np.float64)
    return np.abs(trained - np.concatenate([row.logprobs for row in rows]))


def _samples(gaps: dict[str, np.ndarray]) -> list[Sample]:
    return [
        Sample(variant=setting, measure=measure, unit="", repeat=0, value=float(value))
        for setting, gap in gaps.items()
        for measure, value in (
            ("tokens", len(gap)),
            ("mean |log r|", gap.mean()),
            ("p99 |log r|", np.percentile(gap, 99)),
            ("max |log r|", gap.max()),
        )
    ]


def _targets(options: ProbeOptions, gaps: dict[str, np.ndarray], small: bool) -> Iterator[Target]:
    """One bound for every token of a small model; for a large one, whose sums are longer, one for the mean as well.

    Aligned, the bound is 0 whatever the model; in bfloat16, whose kernels differ by what they differ, there is none.
    """
    largest = max(float(gap.max()) for gap in gaps.values())
    bounded = options.aligned or options.dtype is Dtype.FLOAT32
    limit = 0.0 if options.aligned else SMALL_MAX if small else LARGE_MAX
    claim = "largest |log r| of any setting"
    if bounded:
        yield Target(claim=claim, measured=largest, limit=limit, at_most=True, required=True)
    if bounded and not options.aligned and not small:
        mean = max(float(gap.mean()) for gap in gaps.values())
        claim = "mean |log r| of the worst setting"
        yield Target(claim=claim, measured=mean, limit=LARGE_MEAN, at_most=True, required=True)
