from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from envs_shared import shared_data

from fathom.core.errors import ConfigError, DataError
from fathom.envs.gold_check import check_environment
from fathom.envs.registry import build_environment

ROWS = [{"question": f"What is {i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(10)]


def written(folder: Path, rows: list, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("file", "options", "rows", "first"),
    [
        ("gsm8k_test_first200.jsonl", {}, 200, "Janet"),
        ("gsm8k_test_first200.jsonl", {"prompt": "question", "answer": "answer"}, 200, "Janet"),
        ("dapo_math_row.jsonl", {}, 1, "Solve the following"),
        ("verl_style_gsm8k_first50.jsonl", {}, 50, "Janet"),
        ("verl_style_gsm8k_first50.jsonl", {"prompt": "prompt", "answer": "reward_model.ground_truth"}, 50, "Janet"),
        ("verl_style_gsm8k_first50.jsonl", {"prompt": "extra_info.question", "answer": "extra_info.answer"}, 50, ""),
        ("areal_sample_math.jsonl", {}, 10, "What is 15 + 27?"),
        ("roll_math_benchmarks_first60.jsonl", {"messages": "messages"}, 60, "Every morning"),
        ("roll_math_benchmarks_first60.jsonl", {"prompt": "prompt"}, 60, "Every morning"),
    ],
)
def test_rows_of_other_systems_load_as_they_are_and_pass_the_gold_check(file, options, rows, first):
    environment = build_environment("rows", {"path": str(shared_data() / file), **options})
    assert len(environment.tasks()) == rows
    question = environment.tasks()[0].messages[-1]
    assert question["content"].startswith(first)
    assert set(question) == {"role", "content"}
    report = check_environment(environment, n=rows)
    assert report.checked == rows
    assert not report.faults


@pytest.mark.parametrize("file", ["tinker_conversations_first20.jsonl", "nemo_gym_weather_example.jsonl"])
def test_rows_without_an_answer_are_refused(file):
    with pytest.raises(DataError, match=r"row 1: set task.options.*columns found: "):
        build_environment("rows", {"path": str(shared_data() / file)})


def test_two_possible_columns_are_asked_about(tmp_path):
    path = written(tmp_path, [{"prompt": "a", "question": "b", "answer": "1"}])
    with pytest.raises(DataError, match="both prompt and question could be meant"):
        build_environment("rows", {"path": path})


def test_a_wrong_column_gives_one_error_that_names_everything(tmp_path):
    path = written(tmp_path, [{"q": "1+1?", "reward": {"truth": "2", "style": "rule"}}] * 3)
    with pytest.raises(DataError) as error:
        build_environment("rows", {"path": path, "prompt": "q", "answer": "reward.gold"})
    assert (
        str(error.value) == f"{path}: row 1 has no column 'reward.gold'; columns found: q, reward.truth, reward.style"
    )


def test_a_row_in_the_middle_is_named_by_its_line(tmp_path):
    path = Path(written(tmp_path, ROWS[:2]))
    path.write_text(path.read_text() + "\n" + json.dumps({"question": "x"}) + "\n")
    with pytest.raises(DataError, match=r"row 4 has no column 'answer'; columns found: question"):
        build_environment("rows", {"path": str(path)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"question": "a", "answer": "1"}\n{"question"', "row 2 is not a JSON object"),
        ("[1, 2]\n", "row 1 is not a JSON object"),
        ('{"question": "\\ud800", "answer": "1"}\n', "row 1 is not a JSON object"),
        ('{"question": "a", "answer": ""}\n', "row 1: column answer is empty"),
        ('{"question": "a", "answer": null}\n', "row 1: column answer must be text or a number, got NoneType"),
        ('{"question": "a", "answer": [1]}\n', "got list"),
        ('{"question": "", "answer": "1"}\n', "row 1: column question is neither text nor"),
        ('{"question": 3, "answer": "1"}\n', "row 1: column question is neither text nor"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}\n',
            "does not end with a message of the",
        ),
        ('{"messages": [], "answer": "1"}\n', "does not end with a message of the"),
    ],
)
def test_bad_data_is_named(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        build_environment("rows", {"path": str(path)})
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "rows.csv", "broken.parquet"])
def test_files_that_cannot_be_read(tmp_path, name):
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "broken.parquet").write_text("PAR0")
    with pytest.raises(DataError, match=str(tmp_path)):
        build_environment("rows", {"path": str(tmp_path / name)})


def test_parquet_with_nested_columns(tmp_path):
    rows = [
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"{i}?"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
        }
        for i in range(5)
    ]
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    environment = build_environment("rows", {"path": path, "eval_rows": 2})
    assert [task.answer for task in environment.tasks()] == ["0", "1", "2"]
    assert (
        environment.tasks()[1].messages == rows[1]["prompt"]
        or list(environment.tasks()[1].messages) == rows[1]["prompt"]
    )
    with pytest.raises(
        DataError, match=r"row 1 has no column 'truth'; columns found: prompt, reward_model.*ground_truth"
    ):
        build_environment("rows", {"path": path, "answer": "truth"})


def test_held_out_rows_are_not_trained(tmp_path):
    path = written(tmp_path, [*ROWS, ROWS[0]])
    environment = build_environment("rows", {"path": path, "eval_rows": 3})
    questions = [task.messages[0]["content"] for task in environment.eval_tasks()]
    assert questions == [ROWS[8]["question"], ROWS[9]["question"], ROWS[0]["question"]]
    assert [task.messages[0]["content"] for task in environment.tasks()] == [row["question"] for row in ROWS[1:8]]


def test_a_file_of_held_out_rows(tmp_path):
    train, held_out = written(tmp_path, ROWS[:4]), written(tmp_path, ROWS[3:6], "test.jsonl")
    environment = build_environment("rows", {"path": train, "eval_path": held_out})
    assert len(environment.tasks()) == 3
    assert len(environment.eval_tasks()) == 3
    assert len({task.id for task in (*environment.tasks(), *environment.eval_tasks())}) == 6


def test_holding_out_everything_leaves_no_tasks(tmp_path):
    with pytest.raises(DataError, match="no training tasks"):
        build_environment("rows", {"path": written(tmp_path, ROWS), "eval_rows": 10})


def test_prompts_are_dressed(tmp_path):
    options = {"path": written(tmp_path, ROWS), "system_prompt": "Be brief.", "instruction": "Think.", "max_rows": 2}
    environment = build_environment("rows", options)
    assert len(environment.tasks()) == 2
    assert environment.tasks()[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 0 + 1?\n\nThink."},
    )


def test_a_second_system_message_is_refused(tmp_path):
    row = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}
    with pytest.raises(DataError, match="has a system message of its own"):
        build_environment("rows", {"path": written(tmp_path, [row]), "system_prompt": "c"})


def test_exact_grading_knows_no_mathematics(tmp_path):
    path = written(tmp_path, [{"question": "a", "answer": "1/2"}])
    environment = build_environment("rows", {"path": path, "grader": "exact"})
    task = environment.tasks()[0]
    assert environment.grade(task, " 1/2\n").total == 1.0
    assert environment.grade(task, "0.5").total == 0.0
    assert not environment.grade(task, " ").answer_found


def test_rows_stay_at_home_when_the_grader_travels(tmp_path):
    environment = build_environment("rows", {"path": written(tmp_path, ROWS)})
    copy = pickle.loads(pickle.dumps(environment))
    assert len(pickle.dumps(environment)) < 1000
    assert copy.grade(environment.tasks()[1], "2").total == 1.0


@pytest.mark.parametrize(
    "options", [{"prompt": "a", "messages": "b"}, {"eval_path": "x", "eval_rows": 1}, {"max_rows": 0}, {"grader": "x"}]
)
def test_options_that_contradict(options):
    with pytest.raises(ConfigError, match=r"task\.options"):
        build_environment("rows", {"path": "x", **options})
