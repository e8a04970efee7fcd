"""Whole runs in which an agent acts, and what such a run refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from small_runs import require_sound
from talks import TEMPLATE

from fathom import Run
from fathom.apps.cli.trace import trace
from fathom.config.load import load_config
from fathom.core.errors import ConfigError
from fathom.core.ids import TrajectoryId
from fathom.core.records.trajectory import Ungraded
from fathom.evidence.atif.export import documents_of
from fathom.evidence.atif.words import Words
from fathom.evidence.report.summary import summarise
from fathom.evidence.runs import tokenizer_of
from fathom.evidence.trace import trace_trajectory
from fathom.ledger.events import TrajectoryEnded
from fathom.ledger.reader import LedgerReader
from fathom.model.tiny import make_tiny
from fathom.text.atif.document import decode, encode
from fathom.text.atif.rows import demonstrations_of
from fathom.text.characters import save_character_tokenizer

CONFIG = """
name = "talks"
[task]
kind = "talks:Talks"
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 12
max_prompt_tokens = 188
[engine]
kind = "scripted"
[trainer]
steps = 3
groups_per_step = 2
[trainer.optimizer]
lr = 1e-3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_character_tokenizer(folder)
    described = folder / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"chat_template": TEMPLATE}))
    make_tiny("arithmetic", 0, folder)
    return folder


def run_of(tmp_path: Path, model: Path | None, *overrides: str) -> Run:
    """`model`: None: a tiny one, which has no template."""
    file = tmp_path / "talks.toml"
    file.write_text(CONFIG)
    chosen = f'model.path="{model}"' if model else 'model.tiny="arithmetic"'
    given = [chosen, f'runs_dir="{tmp_path / "runs"}"', *overrides]
    return Run(load_config(file, given))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("deterministic=true", "deterministic = true cannot hold"),
        ("task.grader_workers=2", r"replace grader_workers by \[task.limits\] grade_s"),
        ('rollout.stop_strings=["x"]', "remove rollout.stop_strings"),
        ("model.chat_template=false", "remove model.chat_template = false"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path: Path, model: Path, override: str, message: str) -> None:
    extra = ["staleness.max_staleness=0"] if override.startswith("deterministic") else []
    with pytest.raises(ConfigError, match=message):
        run_of(tmp_path, model, override, *extra)


@pytest.mark.parametrize("override", ["task.limits.agent_s=1", "rollout.agent.max_turns=3"])
def test_options_of_agents_are_refused_in_single_turn_tasks(tmp_path: Path, model: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"in which an agent acts, and task.kind = 'digits:Digits' is single-turn"):
        run_of(tmp_path, model, 'task.kind="digits:Digits"', override)


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        run_of(tmp_path, None)


def require_exported(reader: LedgerReader, name: TrajectoryId, words: Words) -> None:
    """Its ATIF documents train what the run trains, of what the agent said and was told."""
    stored = reader.trajectory(name)
    for branch, document in zip(stored.trajectory.payload.branches, documents_of(stored, "talks", words), strict=True):
        document = decode(encode(document), name)
        assert document.steps[0].message.startswith("<bos>user: hello")
        if branch.loss_mask.any():
            (row,) = demonstrations_of(document, name)
            assert row.token_ids.tolist() == branch.token_ids.tolist()
            assert row.loss_mask.tolist() == branch.loss_mask.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("engine", ["scripted", "embedded"])
def test_it_trains_and_evaluates(tmp_path: Path, model: Path, engine: str, staleness: int) -> None:
    run = run_of(
        tmp_path,
        model,
        f"engine.kind={engine}",
        f"staleness.max_staleness={staleness}",
        "evaluation.tasks=2",
    )
    result = run.start()
    assert result.reason == "steps"
    require_sound(result.folder)
    with LedgerReader(result.folder / "ledger") as reader:
        summary = summarise(reader)
        ended = [entry.event for entry in reader.events(TrajectoryEnded)]
        traced = trace_trajectory(reader, ended[0].trajectory)
        for end in ended:
            require_exported(reader, end.trajectory, Words(tokenizer_of(result.folder)))
    assert summary.turns is not None
    assert summary.turns.turns.mean > 1
    rate = summary.turns.hit_rate
    assert 0 <= rate.measured <= rate.bound < 1
    assert 0 < rate.own_turns <= rate.bound
    assert [point.ungraded for point in summary.evaluations] == [0, 0]
    assert traced


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "cause"), [("boot:hang", "boot_timeout"), ("act:die", "agent_died")])
def test_one_member_of_each_group_is_lost(
    tmp_path: Path, model: Path, fault: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(
        tmp_path,
        model,
        f'task.options={{fault="{fault}", claims="{tmp_path}"}}',
        "task.epochs=1",
        "staleness.min_graded=3",
        "task.limits.boot_s=5",
    )
    result = run.start()
    assert result.reason == "steps"
    require_sound(result.folder)
    with LedgerReader(result.folder / "ledger") as reader:
        entries = reader.trajectories()
        rewards = [reader.trajectory(each.id).trajectory.header.reward for each in entries]
        summary = summarise(reader)
    lost = Counter(reward.cause for reward in rewards if isinstance(reward, Ungraded))
    assert lost[cause] >= 6
    assert dict(summary.ungraded)[cause] == lost[cause]
    trace(str(result.folder), trajectory=next(each.id for each in entries if each.reward is None))
    said = " ".join(capsys.readouterr().out.split())
    assert ("the model was asked nothing" in said) == fault.startswith("boot")
