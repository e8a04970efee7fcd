from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from fathom.core.errors import ConfigError
from fathom.core.ports.environment import DemonstratedEnvironment
from fathom.envs.gold_check import check_environment
from fathom.envs.reasoning_gym import AnswerFormat, extract_answer
from fathom.envs.registry import build_environment

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def small(dataset, **options):
    return build_environment("reasoning_gym", {"dataset": dataset, "size": 12, "eval_size": 6, **options})


@pytest.mark.parametrize("answer_format", list(AnswerFormat))
def test_gold_answers_pass_in_every_format(answer_format):
    environment = small("chain_sum", answer_format=answer_format)
    report = check_environment(environment, n=20)
    assert report.checked == 18
    assert not report.faults


@pytest.mark.parametrize(
    "dataset",
    ["basic_arithmetic", "countdown", "letter_counting", "string_manipulation", "arc_1d", "prime_factorization"],
)
def test_families_of_many_kinds_pass_and_travel(dataset):
    environment = small(dataset)
    copy = pickle.loads(pickle.dumps(environment))
    report = check_environment(copy, n=20)
    assert report.checked == 18
    assert not report.faults


def test_a_family_without_reference_answers_can_be_trained_but_not_imitated():
    environment = small("propositional_logic")
    assert check_environment(environment, n=20).without_gold == 18
    assert isinstance(environment, DemonstratedEnvironment)
    with pytest.raises(ConfigError, match="no reference answers"):
        environment.demonstration(environment.tasks()[0])


def test_train_and_held_out_questions_differ_though_the_family_repeats_itself():
    """40 draws of a coin's outcomes repeat; ids and questions never do."""
    environment = small("gcd", parameters={"min_value": 1, "max_value": 9}, size=20, eval_size=10)
    questions = [task.messages[-1]["content"] for task in (*environment.tasks(), *environment.eval_tasks())]
    assert len(set(questions)) == 30


def test_the_held_out_set_does_not_depend_on_the_training_size():
    assert small("chain_sum").eval_tasks() == small("chain_sum", size=30).eval_tasks()
    assert small("chain_sum").eval_tasks() != small("chain_sum", seed=1).eval_tasks()


def test_the_same_questions_in_another_process():
    code = (
        "from fathom.envs.registry import build_environment as b\n"
        "e = b('reasoning_gym', {'dataset': 'chain_sum', 'size': 12, 'eval_size': 6})\n"
        "print(' '.join(t.id for t in e.tasks()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [task.id for task in small("chain_sum").tasks()]


def test_an_answer_of_the_wrong_kind_scores_0_and_counts_as_none():
    environment = small("prime_factorization")
    graded = environment.grade(environment.tasks()[0], "<answer>banana</answer>")
    assert (graded.total, graded.answer_found) == (0.0, False)
    graded = environment.grade(environment.tasks()[0], "7")
    assert (graded.total, graded.answer_found) == (0.0, False), "no tag"
    graded = environment.grade(environment.tasks()[0], "<answer>7</answer>")
    assert graded.answer_found


@pytest.mark.parametrize(
    ("where", "text", "answer"),
    [
        ("tag", "<answer>1</answer> no <answer> 2\n</answer>.", "2"),
        ("tag", "<answer>1", None),
        ("tag", "1</answer>", None),
        ("tag", "<answer> </answer>", None),
        ("last_line", "a\nb \n\n", "b"),
        ("last_line", "  \n", None),
        ("last_number", "10-5 is 5, or 2,125.50.", "2125.50"),
        ("last_number", "10-5", "5"),
        ("last_number", "it is -7.", "-7"),
        ("last_number", "none", None),
        ("whole", " a\nb ", "a\nb"),
        ("whole", "", None),
    ],
)
def test_where_the_answer_stands(where, text, answer):
    assert extract_answer(text, AnswerFormat(where)) == answer


def test_prompts_are_dressed():
    plain = small("chain_sum").tasks()[0]
    dressed = small("chain_sum", system_prompt="Be brief.", instruction="").tasks()[0]
    assert plain.messages[-1]["content"] == (
        dressed.messages[-1]["content"] + "\n\nGive your final answer between <answer> and </answer>."
    )
    assert dressed.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chainsum"}, r"no family 'chainsum'; did you mean chain_sum"),
        ({"dataset": "zzz"}, "it has ab, acre"),
        (
            {"parameters": {"min_term": 2}},
            r"no parameter 'min_term'; did you mean min_terms\? It has min_terms, max_terms",
        ),
        ({"parameters": {"seed": 2}}, "no parameter 'seed'"),
        ({"parameters": {"min_terms": 9, "max_terms": 2}}, "refuses .*max_terms must be >= min_terms"),
        ({"dataset": "gcd", "size": 500, "parameters": {"max_value": 3}}, "different questions in"),
        ({"answer_format": "tags"}, "answer_format"),
        ({"dataset": "composite"}, "refuses"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        small(**{"dataset": "chain_sum", **options})
