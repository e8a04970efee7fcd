"""An embedded engine with experts: its routes, and the trainer that replays them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from shelf import Shelf

from fathom.config.families import Correction, Dtype
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import StalenessConfig, TrainerConfig
from fathom.core.ids import EngineId, GroupId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.sampling import InFlightMode, SamplingParams
from fathom.core.records.step import GroupBatch, StepOutcome, TrainBatch
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.conformance import Case, Subject
from fathom.rollout.engines.conformance.routes import ROUTE_CASES
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.episode import assemble
from fathom.sync.transports.shared import SharedTransport
from fathom.text.characters import save_character_tokenizer
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

PROMPT = tuple(range(3, 15))


@dataclass
class Bench:
    runner: asyncio.Runner
    subject: Subject
    shelf: Shelf
    folder: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    folder, run = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    save_character_tokenizer(folder)
    make_tiny("moe", 0, folder)
    transport = SharedTransport(run)
    shelf = Shelf(folder, transport, torch.bfloat16)
    spec = EmbeddedSpec(
        engine=EngineId("e0"),
        model_folder=folder,
        log_path=run / "engine.log",
        max_context_tokens=192,
        max_running=16,
        dtype=Dtype.BFLOAT16,
    )
    with asyncio.Runner() as runner:
        engine = runner.run(EmbeddedEngine.launch(spec))
        yield Bench(runner, Subject(engine, shelf.publish, shelf.model.shape.vocab_size, 0.5), shelf, folder)
        runner.run(engine.close())
    transport.close()


@pytest.mark.parametrize("case", ROUTE_CASES, ids=lambda case: case.__name__)
def test_conformance(bench: Bench, case: Case) -> None:
    assert bench.subject.engine.capabilities.routes
    bench.runner.run(case(bench.subject))


async def generate(subject: Subject, count: int) -> list[Generated]:
    await subject.serve(InFlightMode.DRAIN)
    return await asyncio.gather(
        *(subject.run(subject.request(prompt=PROMPT, new=40, seed=seed, routes=True)) for seed in range(count))
    )


def rows_of(group: list[Generated]) -> list[Row]:
    rows: list[Row] = []
    for index, done in enumerate(group):
        payload = assemble(done.request.prompt_ids, done.chunks, SamplingParams(), routes=True)
        branch = payload.branches[0]
        rows.append(
            Row(
                trajectory=TrajectoryId(f"t{index}"),
                group=GroupId("g"),
                branch=0,
                token_ids=branch.token_ids,
                positions=np.flatnonzero(branch.loss_mask),
                logprobs=branch.logprobs,
                policy_version=np.zeros_like(branch.policy_version),
                kv_version=np.zeros_like(branch.kv_version),
                temperature=np.ones(len(branch.logprobs), np.float32),
                kept=None,
                bias=None,
                routes=branch.routes,
                mixed_routes=branch.mixed_routes,
            )
        )
    return rows


def step(folder: Path, rows: list[Row], *, replay: bool) -> StepOutcome:
    config = TrainerConfig(steps=1, groups_per_step=1, dtype=Dtype.BFLOAT16, replay_routes=replay)
    trainer = Trainer(
        TorchBackend(folder, config), config, ObjectiveConfig(correction=Correction.NONE), StalenessConfig()
    )
    trainer.begin()
    rewards = {row.trajectory: float(index % 2) for index, row in enumerate(rows)}
    group = GroupBatch(group=GroupId("g"), rewards=rewards, truncated=frozenset(), rows=tuple(rows))
    (outcome,) = trainer.steps(TrainBatch(groups=(group,)), 0)
    return outcome


def trainer_folder(bench: Bench, number: int, noise: float, folder: Path) -> Path:
    """The weights of a version, moved a little: as a few optimizer steps would."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (tensor.float() * (1 + noise * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in bench.shelf.weights(number).items()
    }
    model = LanguageModel.load(bench.folder, torch.bfloat16, "cpu")
    model.use(weights)
    model.save(folder)
    return folder


def test_the_trainer_goes_where_the_engine_went(bench: Bench, tmp_path: Path) -> None:
    """A policy a little later chooses other experts for many tokens; replayed, it is closer to what was sampled."""
    group = bench.runner.run(generate(bench.subject, 8))
    rows = rows_of(group)
    folder = trainer_folder(bench, int(group[0].policy_version[0]), 0.005, tmp_path)
    free, forced = step(folder, rows, replay=False), step(folder, rows, replay=True)
    assert free.routes is not None
    assert forced.routes is not None
    assert free.mismatch is not None
    assert forced.mismatch is not None
    assert (free.routes.forced_share, forced.routes.forced_share) == (0.0, 1.0)
    assert free.routes.tokens == sum(len(row.token_ids) - 1 for row in rows)
    assert free.routes.agreement < 0.95
    assert free.routes.overlap < forced.routes.overlap
    assert forced.mismatch.abs_log_ratio_mean < free.mismatch.abs_log_ratio_mean
    assert free.routes.mixed_share == 0.0


def test_at_one_version_both_choose_alike_and_replay_changes_little(bench: Bench, tmp_path: Path) -> None:
    group = bench.runner.run(generate(bench.subject, 8))
    rows = rows_of(group)
    folder = trainer_folder(bench, int(group[0].policy_version[0]), 0.0, tmp_path)
    forced = step(folder, rows, replay=True)
    assert forced.mismatch is not None
    assert forced.routes is not None
    assert forced.routes.agreement > 0.5
    assert forced.mismatch.abs_log_ratio_mean < 0.05
