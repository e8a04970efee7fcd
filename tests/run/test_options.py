"""Every option is read where it acts, and what can be seen of them in a history is as asked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import DETERMINISTIC, ENGINES, SCRIPTED, digests, require_sound, small_config

import fathom
from fathom import Run
from fathom.config.load import option_names
from fathom.core.records.bias import LogitBias
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.ledger.events import Evaluated, GroupStarted, Published, StepTaken, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.text.tokenizer import Tokenizer

SOURCE = Path(fathom.__file__).parent
UNUSUAL = """
seed=5
task.shuffle=false
rollout.group_size=2
rollout.max_new_tokens=3
rollout.sampling.top_k=5
rollout.sampling.temperature=0.7
rollout.sampling.logit_bias.5=-1.5
rollout.sampling.logit_bias.3=2
staleness.max_staleness=3
staleness.publish_every=2
trainer.groups_per_step=3
trainer.optimizer.lr=0.002
trainer.optimizer.warmup_steps=2
checkpoint.every_steps=4
checkpoint.keep=1
sync.gap_rows=0
sync.transport=disk
warm_start.steps=3
warm_start.tasks=10
warm_start.batch_size=4
evaluation.tasks=5
evaluation.every_steps=2
evaluation.samples=2
evaluation.pass_at=2
"""


def attributes_read() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield node.attr


def test_no_option_is_ignored() -> None:
    read = set(attributes_read())
    own_rules = {"max_kv_staleness"}  # read through `kv_bound`
    assert not [name for name in option_names() if name.rpartition(".")[2] not in read | own_rules]


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerReader]:
    config = small_config(tmp_path_factory.mktemp("unusual"), SCRIPTED, *UNUSUAL.split())
    result = Run(config).start()
    require_sound(result.folder)
    assert [path.name for path in (result.folder / "checkpoints").iterdir()] == ["step-000006"]
    with LedgerReader(result.folder / "ledger") as reader:
        yield reader


def test_groups_are_as_asked(unusual: LedgerReader) -> None:
    groups = [entry.event for entry in unusual.events(GroupStarted)]
    assert {len(group.members) for group in groups} == {2}
    assert [group.task for group in groups[:4]] == ["train-0", "train-1", "train-2", "train-3"]
    assert all(len({use.group for use in unusual.rows_at(step)}) == 3 for step in range(1, 7))


def test_sampling_is_as_asked(unusual: LedgerReader) -> None:
    entries = unusual.trajectories()
    assert max(entry.sampled_tokens for entry in entries) == 3
    (branch,) = unusual.trajectory(entries[0].id).trajectory.payload.branches
    assert branch.turns[0].sampling == SamplingParams(
        temperature=0.7, top_k=5, logit_bias=LogitBias(ids=(3, 5), values=(2.0, -1.5))
    )
    assert branch.kept is not None
    assert set((branch.kept.offsets[1:] - branch.kept.offsets[:-1]).tolist()) == {5}


def test_publications_are_as_asked(unusual: LedgerReader) -> None:
    published = [entry.event for entry in unusual.events(Published)]
    assert [event.version.number for event in published] == [0, 2, 4, 6]
    assert {event.transport for event in published} == {"disk"}
    assert {event.gap for event in published} == {None}


def test_phases_are_as_asked(unusual: LedgerReader) -> None:
    assert [entry.event.step for entry in unusual.events(WarmStartStepped)] == [1, 2, 3]
    evaluated = [entry.event for entry in unusual.events(Evaluated)]
    assert [event.version.number for event in evaluated] == [0, 2, 4, 6]
    assert {(event.tasks, event.samples, event.pass_at, len(event.per_task)) for event in evaluated} == {(5, 2, 2, 5)}


def test_the_learning_rate_is_as_asked(unusual: LedgerReader) -> None:
    rates = [entry.event.metrics.lr for entry in unusual.events(StepTaken)]
    assert rates == pytest.approx([0.001, 0.002, 0.002, 0.002, 0.002, 0.002])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_barrier_may_be_larger_than_what_the_engine_runs(tmp_path: Path, engine: str) -> None:
    result = Run(small_config(tmp_path, engine, "engine.max_running=3", "trainer.steps=2", *DETERMINISTIC)).start()
    assert len(digests(result.folder)) == 2


def test_several_steps_share_a_batch(tmp_path: Path) -> None:
    options = "trainer.steps_on_a_batch=2", "trainer.steps=4", "rollout.in_flight=recompute"
    result = Run(small_config(tmp_path, SCRIPTED, *options)).start()
    with LedgerReader(result.folder / "ledger") as reader:
        rows = [[use.trajectory for use in reader.rows_at(step)] for step in (1, 2, 3, 4)]
    assert [len(names) for names in rows] == [4, 4, 4, 4]
    assert len({name for names in rows for name in names}) == 16
    require_sound(result.folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_ends_the_answer_and_not_the_record(tmp_path: Path, engine: str) -> None:
    """Every second of the first digits ends the text; its token is trained, and the grader never sees it."""
    options = 'rollout.stop_strings=["0", "2", "4", "6", "8"]', "trainer.steps=2"
    result = Run(small_config(tmp_path, engine, *options)).start()
    require_sound(result.folder)
    tokenizer = Tokenizer.load(result.folder / "tokenizer")
    ended = 0
    with LedgerReader(result.folder / "ledger") as reader:
        for entry in reader.trajectories():
            (branch,) = reader.trajectory(entry.id).trajectory.payload.branches
            text = tokenizer.decode(branch.token_ids[branch.sampled].tolist())
            places = [place for place, character in enumerate(text) if character in "02468"]
            assert places in ([], [len(text) - 1])
            ended += bool(places)
            assert not places or branch.turns[0].finish_reason is FinishReason.STOP
    assert ended


@pytest.mark.slow
def test_the_trainer_adds_the_bias_that_the_engine_added(tmp_path: Path) -> None:
    """Engine and trainer agree at the same version, and on tokens of age 0, to the rounding of float32."""
    options = ["rollout.sampling.logit_bias.5=3", "rollout.sampling.logit_bias.7=-100", "trainer.steps=2"]
    result = Run(small_config(tmp_path, *options, *DETERMINISTIC)).start()
    with LedgerReader(result.folder / "ledger") as reader:
        gaps = [entry.event.gap for entry in reader.events(Published) if entry.event.gap is not None]
        assert gaps
        assert all(gap.k2 < 1e-8 for gap in gaps)
        sampled = [
            token
            for entry in reader.trajectories()
            for branch in reader.trajectory(entry.id).trajectory.payload.branches
            for token in branch.token_ids[branch.sampled].tolist()
        ]
    assert 7 not in sampled
    assert 5 in sampled
