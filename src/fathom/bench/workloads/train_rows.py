"""Training alone: forward, backward and optimizer step on the same rows, by TRL and by this trainer in three ways.

Rows of a group have a common prompt; the lengths of answers have a long tail. Tokens are random: they do not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from fathom.bench.options import TrainOptions
from fathom.bench.peers.trl_python import TrlPython, TrlRows
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median, ratios, values
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import NoProgressError
from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.step import GroupBatch, TrainBatch
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.packing import micro_batches
from fathom.trainer.loop.trainer import Trainer

ALONE, PACKED, SHARED, TRL_ROWS = "Fathom, rows alone", "Fathom, packed", "Fathom", "TRL, given rows"
TRAINING, FILLED, COUNT = "training step", "filled", "micro-batches"
IN_ORDER, LONGEST_FIRST = "packing: first fit, as rows come", "packing: first fit, longest first"
OURS = "packing: Fathom"
_LR = 1e-6
_BUDGET = 2048
_ROWS_PER_FORWARD = 4
_VARIANTS: dict[str, tuple[int, bool]] = {ALONE: (1, False), PACKED: (_BUDGET, False), SHARED: (_BUDGET, True)}
"""Token budget of a micro-batch, and whether prefixes are shared."""
_PACKED_ROWS, _DRAWS = 512, 10


def train_rows(options: TrainOptions, trl: TrlPython | None, model: Path, say: Say) -> Measured:
    """Time steps of each variant in turn. Raises ConfigError when TRL fails, NoProgressError when nothing changed."""
    torch.set_num_threads(options.threads)
    vocabulary = int(AutoConfig.from_pretrained(model, local_files_only=True).vocab_size)
    batch = _with_logprobs(options, model, _batch(options, vocabulary))
    samples: list[Sample] = []
    for repeat, variant in alternating((*_VARIANTS, *([TRL_ROWS] if trl else [])), options.repeats):
        if trl is not None and variant == TRL_ROWS:
            seconds = _by_trl(options, trl, model, batch)
        else:
            seconds = _by_fathom(options, model, batch, variant)
        samples += [
            Sample(variant=variant, measure=TRAINING, unit="s", repeat=repeat * len(seconds) + step, value=value)
            for step, value in enumerate(seconds)
        ]
        say(f"block {repeat + 1} of {options.repeats}: {variant}: {sum(seconds) / len(seconds):.2f} s a step")
    samples += ratios(samples, TRAINING, ALONE, SHARED) + ratios(samples, TRAINING, PACKED, SHARED)
    if trl is not None:
        for variant in _VARIANTS:
            samples += ratios(samples, TRAINING, TRL_ROWS, variant)
    return Measured(samples=samples, targets=list(_targets(samples)), notes=[_note(batch)])


def packing(options: TrainOptions) -> Measured:
    """How many micro-batches lengths with a long tail need, and how evenly they fill them. Only arithmetic."""
    samples: list[Sample] = []
    for draw in range(_DRAWS):
        lengths = (options.prompt_tokens + _answer_lengths(options, _PACKED_ROWS, options.seed + draw)).tolist()
        cut = micro_batches(lengths, range(len(lengths)), _BUDGET)
        loads = {
            OURS: [sum(lengths[row] for row in rows) for rows in cut],
            LONGEST_FIRST: _first_fit(sorted(lengths, reverse=True)),
            IN_ORDER: _first_fit(lengths),
        }
        for variant, each in loads.items():
            measures = {FILLED: sum(each) / (len(each) * max(each)), COUNT: float(len(each))}
            samples += [
                Sample(variant=variant, measure=measure, unit="", repeat=draw, value=value)
                for measure, value in measures.items()
            ]
    claim = "packing: tokens over the number of micro-batches times the longest, lowest of all draws"
    lowest = min(values(samples, OURS, FILLED))
    return Measured(
        samples=samples, targets=[Target(claim=claim, measured=lowest, limit=0.95, at_most=False, required=True)]
    )


def _first_fit(lengths: Sequence[int]) -> list[int]:
    """Tokens of each micro-batch when every row goes, as it comes, to the first that has room."""
    loads: list[int] = []
    for length in lengths:
        place = next((i for i, load in enumerate(loads) if load + length <= _BUDGET), None)
        if place is None:
            loads.append(length)
        else:
            loads[place] += length
    return loads


def _answer_lengths(options: TrainOptions, count: int, seed: int) -> np.ndarray:
    """int64 [count]."""
    drawn = np.random.default_rng(seed).lognormal(np.log(options.median_tokens), options.sigma, count)
    return np.clip(np.rint(drawn), 1, options.longest_tokens).astype(np.int64)


def _batch(options: TrainOptions, vocabulary: int) -> TrainBatch:
    rng = np.random.default_rng(options.seed)
    lengths = _answer_lengths(options, options.groups * options.group_size, options.seed)
    groups: list[GroupBatch] = []
    for group, own in enumerate(np.split(lengths, options.groups)):
        prompt = rng.integers(0, vocabulary, options.prompt_tokens)
        rows = [_row(group, member, prompt, rng.integers(0, vocabulary, count)) for member, count in enumerate(own)]
        rewards = {row.trajectory: float(member % 2) for member, row in enumerate(rows)}
        groups.append(GroupBatch(group=GroupId(f"{group}"), rewards=rewards, truncated=frozenset(), rows=tuple(rows)))
    return TrainBatch(groups=tuple(groups))


def _row(group: int, member: int, prompt: np.ndarray, answer: np.ndarray) -> Row:
    count = len(answer)
    return Row(
        trajectory=TrajectoryId(f"{group}/{member}"),
        group=GroupId(f"{group}"),
        branch=0,
        token_ids=np.concatenate([prompt, answer]).astype(np.int32),
        positions=np.arange(len(prompt), len(prompt) + count, dtype=np.int64),
        logprobs=np.zeros(count, np.float32),
        policy_version=np.zeros(count, np.int32),
        kv_version=np.zeros(count, np.int32),
        temperature=np.ones(count, np.float32),
        kept=None,
        bias=None,
        routes=None,
        mixed_routes=None,
    )


def _with_logprobs(options: TrainOptions, model: Path, batch: TrainBatch) -> TrainBatch:
    """The rows as if this model had sampled them."""
    trainer = _trainer(options, model, SHARED)
    groups = [
        replace(group, rows=tuple(replace(row, logprobs=new) for row, new in zip(group.rows, found, strict=True)))
        for group in batch.groups
        for found in [trainer.logprobs(group.rows)]
    ]
    return TrainBatch(groups=tuple(groups))


def _trainer(options: TrainOptions, model: Path, variant: str) -> Trainer:
    budget, share = _VARIANTS[variant]
    steps = options.warmup + options.steps
    config = TrainerConfig(
        steps=steps,
        groups_per_step=options.groups,
        dtype=options.dtype,
        threads=options.threads,
        tokens_per_micro_batch=budget,
        share_prefixes=share,
        optimizer=OptimizerConfig(lr=_LR),
    )
    trainer = Trainer(TorchBackend(model, config), config, ObjectiveConfig(), StalenessConfig(max_staleness=steps))
    trainer.begin()
    return trainer


def _by_fathom(options: TrainOptions, model: Path, batch: TrainBatch, variant: str) -> list[float]:
    """Seconds of each step counted."""
    trainer, seconds = _trainer(options, model, variant), list[float]()
    for _ in range(options.warmup + options.steps):
        began = time.perf_counter()
        for outcome in trainer.steps(batch, trainer.version):
            if not outcome.stepped:
                raise NoProgressError(f"step {outcome.number} changed nothing: {outcome.why_not}")
        seconds.append(time.perf_counter() - began)
    return seconds[options.warmup :]


def _by_trl(options: TrainOptions, trl: TrlPython, model: Path, batch: TrainBatch) -> list[float]:
    """Seconds of each step counted, from when the rewards are known."""
    rows = options.groups * options.group_size
    split = options.prompt_tokens
    request = TrlRows(
        model=str(model),
        dtype=options.dtype,
        prompts=tuple(tuple(group.rows[0].token_ids[:split].tolist()) for group in batch.groups),
        answers=tuple(tuple(tuple(row.token_ids[split:].tolist()) for row in group.rows) for group in batch.groups),
        rows_per_forward=_ROWS_PER_FORWARD if rows % _ROWS_PER_FORWARD == 0 else rows,
        steps=options.steps,
        warmup=options.warmup,
        threads=options.threads,
        learning_rate=_LR,
    )
    answer = trl.run(request)
    mean = float(np.mean([len(row.positions) for group in batch.groups for row in group.rows]))
    if len(answer.train_s) != options.steps or abs(answer.mean_length - mean) > 1e-3 * mean:
        raise NoProgressError(
            f"TRL took {len(answer.train_s)} steps on answers of {answer.mean_length:g} tokens, not {options.steps} on "
            f"answers of {mean:g}: another workload is not compared"
        )
    return list(answer.train_s)


def _note(batch: TrainBatch) -> str:
    lengths = [len(row.token_ids) for group in batch.groups for row in group.rows]
    answers = [len(row.positions) for group in batch.groups for row in group.rows]
    return (
        f"given rows: {len(lengths)} of {sum(lengths)} tokens, answers of {min(answers)} to {max(answers)}; "
        f"{_BUDGET} tokens a micro-batch, TRL {_ROWS_PER_FORWARD} rows, padded"
    )


def _targets(samples: Sequence[Sample]) -> Iterator[Target]:
    if any(sample.variant == TRL_ROWS for sample in samples):
        measured = median(samples, TRL_ROWS, TRAINING) / median(samples, SHARED, TRAINING)
        claim = "training alone, times as fast as TRL"
        yield Target(claim=claim, measured=measured, limit=1.5, at_most=False, required=False)
