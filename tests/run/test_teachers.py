"""Teachers of a run: who teaches what, what they are asked, and what happens when they fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_runs import SCRIPTED, require_sound, small_config

from fathom import Run
from fathom.config.load import load_config
from fathom.core.errors import ConfigError, NoProgressError, RecordError
from fathom.core.ports.engine import Engine, ScoreRequest, ScoreResult
from fathom.core.records.row import rows_of
from fathom.core.records.scores import IdLists, IdScores
from fathom.evidence.report.summary import summarise
from fathom.ledger.events import EngineJoined, EngineRestored, FaultSeen, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import ScriptedEngine
from fathom.run.teachers.teaching import merged
from fathom.text.characters import save_character_tokenizer

TAUGHT = (
    SCRIPTED,
    "trainer.steps=3",
    "distillation.teachers.a.tiny=arithmetic",
    "distillation.teachers.a.kind=scripted",
    "rollout.sampling.temperature=0.7",
)
SEEDS = {"teacher-a": 7}


class School:
    """Starts scripted engines: teachers say something else than the student, and keep what they were asked."""

    def __init__(self, *faults: Fault, again: bool = False) -> None:
        """`faults` are the first teacher's; `again`: those of every one after it, too."""
        self.asked: list[ScoreRequest] = []
        self.launched = 0
        self._faults = faults
        self._again = again

    async def launch(self, spec: EmbeddedSpec) -> Engine:
        size = json.loads((spec.model_folder / "config.json").read_text())["vocab_size"]
        teaches = spec.engine.startswith("teacher-")
        self.launched += teaches
        faulty = teaches and (self.launched == 1 or self._again)
        engine = ScriptedEngine(
            ToyPolicy(size, seed=SEEDS.get(spec.engine, 0)),
            engine_id=spec.engine,
            faults=self._faults if faulty else (),
            max_context_tokens=spec.max_context_tokens,
        )
        return Listening(engine, self.asked) if teaches else engine  # pyright: ignore[reportReturnType]


class Listening:
    """An engine whose scorings are written down."""

    def __init__(self, engine: ScriptedEngine, asked: list[ScoreRequest]) -> None:
        self._engine = engine
        self._asked = asked

    async def score(self, request: ScoreRequest) -> ScoreResult:
        self._asked.append(request)
        return await self._engine.score(request)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def play(tmp_path: Path, school: School, *options: str) -> Path:
    result = Run(small_config(tmp_path, *TAUGHT, *options)).start(launcher=school.launch)
    assert result.reason == "steps"
    return result.folder


def taught_trajectories(reader: LedgerReader):
    return [reader.trajectory(entry.id).trajectory for entry in reader.trajectories()]


def test_every_row_has_its_teachers_scores_at_its_own_temperature(tmp_path: Path) -> None:
    school = School()
    folder = play(tmp_path, school)
    assert school.asked
    assert all(np.all(request.temperature == np.float32(0.7)) for request in school.asked)
    require_sound(folder)
    with LedgerReader(folder / "ledger") as reader:
        (joined,) = [each.event for each in reader.events(EngineJoined) if each.event.engine == "teacher-a"]
        assert joined.version is not None
        rows = [row for ended in taught_trajectories(reader) for row in rows_of(ended)]
        assert rows
        for row in rows:
            assert row.teacher is not None
            assert (row.teacher.teacher, row.teacher.model) == ("a", joined.version.digest)
            assert np.array_equal(row.teacher.temperature, row.temperature)
            assert row.teacher.compared is None
        for step in reader.events(StepTaken):
            told = step.event.distillation
            assert told is not None
            assert told.scored_share == 1.0
            assert told.tokens == step.event.metrics.tokens > 0
        summary = summarise(reader)
        assert summary.teaching is not None
        assert summary.teaching.teachers == (("a", joined.version.digest),)
        assert len(summary.teaching.reverse_kl) == 3


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (("distillation.form=top_k", "distillation.top_k=3", "distillation.set=union"), 6),
        (("distillation.form=top_k", "distillation.top_k=3", "distillation.set=only_student"), 3),
        (("distillation.form=full_vocabulary",), 52),
    ],
)
def test_ids_come_from_student_and_teacher(tmp_path: Path, options: tuple[str, ...], most: int) -> None:
    folder = play(tmp_path, School(), "rollout.sampling.top_k=20", *options)
    with LedgerReader(folder / "ledger") as reader:
        rows = [row for ended in taught_trajectories(reader) for row in rows_of(ended)]
        widths = set()
        for row in rows:
            assert row.teacher is not None
            assert row.teacher.compared is not None
            assert row.kept is not None
            lists = row.teacher.compared.lists
            widths |= set(np.diff(lists.offsets).tolist())
            for place in range(len(row.positions)):
                assert set(lists.at(place).tolist()) <= set(np.asarray(row.kept.of(place)).tolist())
        assert 1 <= min(widths) <= max(widths) <= min(most, 20)
        steps = [step.event for step in reader.events(StepTaken)]
        assert all(step.distillation is not None and step.distillation.compared is not None for step in steps)
        assert all(step.stepped for step in steps)


def test_a_teacher_that_dies_is_replaced_and_asked_again(tmp_path: Path) -> None:
    school = School(Fault(call=Call.SCORE, trouble=Trouble.DIES))
    folder = play(tmp_path, school)
    assert school.launched == 2
    with LedgerReader(folder / "ledger") as reader:
        assert [each.event.engine for each in reader.events(EngineRestored)] == ["teacher-a"]
        rows = [row for ended in taught_trajectories(reader) for row in rows_of(ended)]
        assert all(row.teacher is not None for row in rows)


def test_a_teacher_that_cannot_be_brought_back_ends_the_run(tmp_path: Path) -> None:
    school = School(Fault(call=Call.SCORE, trouble=Trouble.DIES), again=True)
    with pytest.raises(NoProgressError, match="teacher-a had to be replaced more than"):
        Run(small_config(tmp_path, *TAUGHT)).start(launcher=school.launch)


def test_a_wrong_answer_leaves_the_row_out_with_a_reason(tmp_path: Path) -> None:
    school = School(Fault(call=Call.SCORE, trouble=Trouble.NAN_LOGPROB, times=2))
    folder = play(tmp_path, school)
    with LedgerReader(folder / "ledger") as reader:
        faults = [each.event for each in reader.events(FaultSeen) if each.event.component == "teacher-a"]
        assert [fault.kind for fault in faults] == ["RecordError"] * 2
        steps = [step.event.distillation for step in reader.events(StepTaken)]
        assert min(step.scored_share for step in steps if step is not None) < 1
        masked = summarise(reader).books.masked
        assert any("no_teacher" in str(reason) for reason in masked)
        require_sound(folder)


def other_tokenizer(folder: Path) -> Path:
    """A tiny model whose tokenizer has two characters swapped."""
    folder.mkdir()
    save_character_tokenizer(folder)
    make_tiny("arithmetic", 0, folder)
    path = folder / "tokenizer.json"
    text = path.read_text()
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    return folder


def refused(tmp_path: Path, *options: str) -> str:
    with pytest.raises(ConfigError) as error:
        Run(small_config(tmp_path, SCRIPTED, *options))
    assert not (tmp_path / "runs").exists(), "nothing was started"
    return str(error.value)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = other_tokenizer(tmp_path / "other")
    said = refused(tmp_path, f'distillation.teachers.a.path="{path}"')
    assert "its tokenizer" in said
    assert "is another one than the student's" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("distillation.teachers.a.tasks=train-1*",), "task 'train-0' has no teacher (a: 'train-1*')"),
        (
            ("distillation.teachers.b.tiny=arithmetic", "distillation.teachers.b.tasks=*-7"),
            "task 'train-7' has 2 teachers: a, b",
        ),
        (
            (
                "distillation.teachers.a.tasks=train-*",
                "distillation.teachers.b.tiny=arithmetic",
                "distillation.teachers.b.tasks=eval-*",
            ),
            "distillation.teachers.b: no task matches",
        ),
        (("distillation.form=full_vocabulary", "rollout.max_kept_ids=50"), "needs 52 ids and log-probabilities"),
        (("distillation.form=top_k", "distillation.top_k=30", "rollout.max_kept_ids=16"), "lower the one or raise"),
        (("objective.filter_zero_variance=true",), "does not train on rewards"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused(tmp_path, "distillation.teachers.a.tiny=arithmetic", *options)


def test_several_teachers_share_the_tasks(tmp_path: Path) -> None:
    shares = ("distillation.teachers.a.tasks=*[02468]", "distillation.teachers.b.tasks=*[13579]")
    both = ("distillation.teachers.b.tiny=arithmetic", "distillation.teachers.b.kind=scripted")
    folder = play(tmp_path, School(), *shares, *both)
    with LedgerReader(folder / "ledger") as reader:
        found = {
            (int(ended.header.task[-1]) % 2, row.teacher.teacher)
            for ended in taught_trajectories(reader)
            for row in rows_of(ended)
            if row.teacher is not None
        }
    assert found == {(0, "a"), (1, "b")}


def test_ids_of_both_are_merged_place_by_place() -> None:
    student = IdLists.of([np.array([2, 5], np.int32), np.array([1], np.int32), np.empty(0, np.int32)])
    teacher = IdScores(
        lists=IdLists.of([np.array([5, 9], np.int32), np.empty(0, np.int32), np.array([0], np.int32)]),
        logprobs=np.array([-0.5, -0.9, -0.1], np.float32),
    )
    found = merged(student, np.array([-0.2, -0.5, -0.3], np.float32), teacher, 3)
    assert found.lists.offsets.tolist() == [0, 3, 4, 5]
    assert found.lists.ids.tolist() == [2, 5, 9, 1, 0]
    np.testing.assert_allclose(found.logprobs, [-0.2, -0.5, -0.9, -0.3, -0.1], rtol=1e-6)
    assert found.of_student.tolist() == [True, True, False, True, False]
    assert found.of_teacher.tolist() == [False, True, True, False, True]
    with pytest.raises(RecordError, match="did not score every id"):
        merged(student, np.zeros(2, np.float32), teacher, 3)


def test_the_recipe_is_a_config() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "distillation.toml"
    assert load_config(recipe).distillation is not None
