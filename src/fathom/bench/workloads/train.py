"""One synchronous GRPO step, generation included, beside the same step by TRL on the same machine; and training alone.

Both sides get the same prompts, sample exactly as many tokens, use as many threads and reward in the same way. Blocks
of steps alternate, each block in fresh processes, so both see the same machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fathom.bench.options import TrainOptions, TrainPart
from fathom.bench.peers.trl_python import TrlPython, TrlRequest
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median, ratios
from fathom.bench.rig.plain_loop import StepTimes, plain_loop
from fathom.bench.rig.stand import PROMPT_TOKENS, Stand, open_stand, tiny_model
from fathom.bench.workloads.train_rows import packing, train_rows
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.core.errors import NoProgressError
from fathom.core.ids import GroupId, Occurrence, TaskId
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import Graded, Reward
from fathom.rollout.episode import EpisodePlan
from fathom.run.rollouts.seeds import request_seed

FATHOM, TRL = "Fathom", "TRL"
STEP, ROLLOUT, TRAIN, PUBLISH = "step", "generate and grade", "train", "publish"
PROMPTS = ("write about the sea.", "write about the mountains.")
_LR = 1e-6
_PACKED_TOKENS = 2048


def train(options: TrainOptions, say: Say) -> Measured:
    """Time blocks of steps of each side in turn. Raises ConfigError when TRL cannot be run."""
    trl = TrlPython(Path(options.trl_python)) if options.trl_python else None
    parts: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="fathom-train-") as name:
        scratch = Path(name)
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        if TrainPart.STEP in options.parts:
            parts.append(_whole_step(options, trl, model, scratch, say))
        if TrainPart.ROWS in options.parts:
            parts += [packing(options), train_rows(options, trl, model, say)]
    return Measured(
        samples=[sample for part in parts for sample in part.samples],
        targets=[target for part in parts for target in part.targets],
        notes=[*([trl.describe()] if trl else []), *(note for part in parts for note in part.notes)],
    )


def _whole_step(options: TrainOptions, trl: TrlPython | None, model: Path, scratch: Path, say: Say) -> Measured:
    samples: list[Sample] = []
    for repeat, side in alternating((FATHOM, TRL) if trl else (FATHOM,), options.repeats):
        if trl is not None and side == TRL:
            measures = _trl_block(options, trl, model)
        else:
            measures = _by_measure(asyncio.run(_fathom_block(options, model, scratch)))
        samples += _samples(side, repeat, measures)
        say(f"block {repeat + 1} of {options.repeats}: {side}: {sum(measures[STEP]) / options.steps:.2f} s a step")
    if trl is not None:
        samples += ratios(samples, STEP, TRL, FATHOM)
    return Measured(samples=samples, targets=list(_targets(samples)))


async def _fathom_block(options: TrainOptions, model: Path, scratch: Path) -> list[StepTimes]:
    steps = options.warmup + options.steps
    trainer = TrainerConfig(
        steps=steps,
        groups_per_step=len(PROMPTS),
        dtype=options.dtype,
        threads=options.threads,
        tokens_per_micro_batch=_PACKED_TOKENS,
        optimizer=OptimizerConfig(lr=_LR),
    )
    async with open_stand(
        model,
        scratch,
        trainer,
        max_context_tokens=PROMPT_TOKENS + options.max_new_tokens,
        max_running=len(PROMPTS) * options.generations,
        engine_config=EngineConfig(threads=options.threads),
    ) as stand:
        await stand.publish(0)
        runner = stand.runner(_grade, stop_ids=())
        times = await plain_loop(stand, runner, [_plans(options, stand, step) for step in range(steps)])
    return times[options.warmup :]


def _plans(options: TrainOptions, stand: Stand, step: int) -> list[EpisodePlan]:
    return [
        EpisodePlan(
            group=GroupId(f"step{step}/{place}"),
            member=member,
            occurrence=Occurrence(epoch=step, index=place),
            attempt=0,
            task=Task(id=TaskId(prompt), messages=({"role": "user", "content": prompt},), answer=""),
            prompt_ids=stand.renderer.render_prompt([{"role": "user", "content": prompt}]),
            sampling=SamplingParams(),
            max_new_tokens=options.max_new_tokens,
            seed=request_seed(step, place, member, 0),
            priority=place,
            purpose=Purpose.ROLLOUT,
            pinned=None,
            barrier=None,
        )
        for place, prompt in enumerate(PROMPTS)
        for member in range(options.generations)
    ]


async def _grade(task: Task, answer: str) -> Reward:
    """Share of the letter e: cheap, and different from sample to sample."""
    share = answer.count("e") / max(1, len(answer))
    return Graded(components={"letter": share}, grader="letter/1", answer_found=True)


def _trl_block(options: TrainOptions, trl: TrlPython, model: Path) -> dict[str, list[float]]:
    request = TrlRequest(
        model=str(model),
        dtype=options.dtype,
        prompts=PROMPTS,
        generations=options.generations,
        max_new_tokens=options.max_new_tokens,
        steps=options.steps,
        warmup=options.warmup,
        threads=options.threads,
        learning_rate=_LR,
    )
    answer = trl.run(request)
    if len(answer.rollout_s) != options.steps or answer.mean_length != options.max_new_tokens:
        raise NoProgressError(
            f"TRL took {len(answer.rollout_s)} steps of {answer.mean_length:g} tokens, not {options.steps} of "
            f"{options.max_new_tokens}: another workload is not compared"
        )
    totals = [rollout + rest for rollout, rest in zip(answer.rollout_s, answer.train_s, strict=True)]
    return {STEP: totals, ROLLOUT: list(answer.rollout_s), TRAIN: list(answer.train_s)}


def _by_measure(times: Sequence[StepTimes]) -> dict[str, list[float]]:
    return {
        STEP: [step.total_s for step in times],
        ROLLOUT: [step.rollout_s for step in times],
        TRAIN: [step.train_s for step in times],
        PUBLISH: [step.publish_s for step in times],
    }


def _samples(side: str, block: int, measures: dict[str, list[float]]) -> list[Sample]:
    return [
        Sample(variant=side, measure=measure, unit="s", repeat=block * len(seconds) + step, value=value)
        for measure, seconds in measures.items()
        for step, value in enumerate(seconds)
    ]


def _targets(samples: Sequence[Sample]) -> Iterator[Target]:
    if any(sample.variant == TRL for sample in samples):
        measured = median(samples, TRL, STEP) / median(samples, FATHOM, STEP)
        claim = "one GRPO step, times as fast as TRL"
        yield Target(claim=claim, measured=measured, limit=1.0, at_most=False, required=False)
