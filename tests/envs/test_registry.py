from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fathom.core.errors import ConfigError, DataError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import DemonstratedEnvironment, Environment, Task
from fathom.envs.gold_check import check_environment
from fathom.envs.registry import build_environment

OWN = '''
from fathom.config.section import Section
from fathom.core.ids import TaskId
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded

class Echo:
    class Options(Section):
        words: tuple[str, ...] = ("a", "b")
        """Words."""

    def __init__(self, options: Options) -> None:
        if "bad" in options.words:
            raise ValueError("a bad word")
        self.words = options.words

    def tasks(self):
        return [Task(id=TaskId(w), messages=({"role": "user", "content": w},), answer=w) for w in self.words]

    def eval_tasks(self):
        return []

    def grade(self, task, answer):
        right = float(answer == task.answer and answer != "impossible")
        return Graded(components={"right": right}, grader="echo/1", answer_found=True)

class Bare:
    tasks, eval_tasks, grade = Echo.tasks, Echo.eval_tasks, Echo.grade
    words = ("x",)

class Empty(Bare):
    words = ()

class Twins(Bare):
    words = ("x", "x")

class Lacking:
    def tasks(self):
        return []

class NoTasks(Bare):
    def tasks(self):
        return ["x"]
'''


@pytest.fixture
def own(tmp_path, request):
    """A module in a fresh working directory; its name is unique because modules are cached."""
    name = f"own_{abs(hash(request.node.name)):x}"
    (tmp_path / f"{name}.py").write_text(OWN)
    before, path = Path.cwd(), list(sys.path)
    os.chdir(tmp_path)
    yield name
    os.chdir(before)
    sys.path[:] = path
    sys.modules.pop(name, None)


def test_a_class_beside_the_config_is_found_and_grades_in_a_worker(own):
    from fathom.envs.grading import Grader

    environment = build_environment(f"{own}:Echo", {"words": ["a", "b", "c"]})

    async def grade():
        async with Grader(environment, workers=1, timeout_s=5.0) as grader:
            return await grader.grade(environment.tasks()[2], "c")

    assert asyncio.run(grade()).total == 1.0


def test_a_class_without_options(own):
    assert len(build_environment(f"{own}:Bare", {}).tasks()) == 1
    with pytest.raises(ConfigError, match=r"takes no options.*remove size"):
        build_environment(f"{own}:Bare", {"size": 3})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Echo", {"wrds": ["a"]}, r"unknown option task.options.wrds; did you mean task.options.words\?"),
        ("Echo", {"words": ["bad"]}, "could not be made: ValueError: a bad word"),
        ("Ecko", {}, r"no class 'Ecko'; did you mean 'Echo'\?"),
        ("Lacking", {}, "it has no eval_tasks, grade"),
        ("Twins", {}, "'x' occurs twice"),
        ("NoTasks", {}, "gave a str"),
        ("Empty", {}, "no training tasks"),
    ],
)
def test_a_class_that_will_not_do(own, name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_environment(f"{own}:{name}", options)


def test_a_module_that_is_not_there_or_fails(own):
    with pytest.raises(ConfigError, match="No module named 'nowhere_at_all'"):
        build_environment("nowhere_at_all:X", {})
    Path("broken_module.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="its module fails: ZeroDivisionError"):
        build_environment("broken_module:X", {})


@pytest.mark.parametrize(
    ("kind", "message"),
    [("aritmetic", "did you mean 'arithmetic'"), ("chess", "Built in: arithmetic, reasoning_gym, rows")],
)
def test_an_unknown_kind(kind, message):
    with pytest.raises(ConfigError, match=message):
        build_environment(kind, {})


def test_options_are_checked_before_any_data_is_read():
    with pytest.raises(ConfigError, match=r"unknown option task.options.pth; did you mean task.options.path\?"):
        build_environment("rows", {"pth": "x"})


def test_the_gold_check_finds_a_grader_that_is_wrong(own):
    report = check_environment(build_environment(f"{own}:Echo", {"words": ["fine", "impossible"]}), n=5)
    assert report.checked == 2
    assert report.faults == ("task impossible: the gold answer 'impossible' got 0, not 1",)


def test_arithmetic_is_what_it_says():
    options = {"num_train": 300, "num_eval": 100, "operators": ["+", "-", "*"], "max_operand": 12, "seed": 5}
    environment = build_environment("arithmetic", options)
    assert isinstance(environment, Environment)
    assert isinstance(environment, DemonstratedEnvironment)
    tasks = [*environment.tasks(), *environment.eval_tasks()]
    assert (len(environment.tasks()), len(environment.eval_tasks())) == (300, 100)
    assert len({task.id for task in tasks}) == 400
    for task in tasks:
        prompt = task.messages[0]["content"]
        assert str(eval(prompt.removesuffix("="))) == task.answer == environment.demonstration(task)
    assert set("".join(task.messages[0]["content"] + task.answer for task in tasks)) == set("0123456789+-*=")
    assert not check_environment(environment, n=100).faults


def test_arithmetic_is_the_same_from_the_same_seed_whatever_the_size():
    def ids(**options):
        environment = build_environment("arithmetic", options)
        return [task.id for task in environment.tasks()], [task.id for task in environment.eval_tasks()]

    assert ids(num_train=50) == ids(num_train=50)
    assert ids(num_train=50)[1] == ids(num_train=500)[1]
    assert ids(num_train=50, seed=1) != ids(num_train=50, seed=2)


@pytest.mark.parametrize(
    ("answer", "reward", "found"),
    [
        ("the sum of 12 and 7 is 19", 1.0, True),
        ("19", 1.0, True),
        ("19 is the sum of 12 and 7", 0.0, True),
        ("the sum of 12 and 7 is 019", 0.0, True),
        ("the sum", 0.0, False),
    ],
)
def test_arithmetic_in_sentences_reads_the_last_integer(answer, reward, found):
    environment = build_environment("arithmetic", {"num_train": 10, "wording": "sentence"})
    task = Task(id=TaskId("t"), messages=({"role": "user", "content": "12+7="},), answer="19")
    graded = environment.grade(task, answer)
    assert (graded.total, graded.answer_found) == (reward, found)
    assert environment.demonstration(task) == "the sum of 12 and 7 is 19"
    plain = build_environment("arithmetic", {"num_train": 10})
    assert plain.demonstration(task) == "19"


@pytest.mark.parametrize(
    ("answer", "reward", "found"),
    [
        ("19", 1.0, True),
        (" 19\n", 1.0, True),
        ("20", 0.0, True),
        ("019", 0.0, True),
        ("", 0.0, False),
        ("1=9", 0.0, False),
    ],
)
def test_arithmetic_grades_exactly(answer, reward, found):
    environment = build_environment("arithmetic", {"num_train": 10})
    task = next(iter(environment.tasks()))
    graded = environment.grade(type(task)(id=task.id, messages=task.messages, answer="19"), answer)
    assert (graded.total, graded.answer_found) == (reward, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_operand": 3}, "only 32 different problems exist"),
        ({"operators": ["/"]}, "operators"),
        ({"operators": ["+", "+"]}, "occurs twice"),
        ({"min_operand": 9, "max_operand": 3}, "above max_operand"),
        ({"num_train": 0}, "num_train"),
    ],
)
def test_arithmetic_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        build_environment("arithmetic", options)


def test_no_data_is_a_data_error(own):
    with pytest.raises(DataError):
        build_environment(f"{own}:Empty", {})


def test_heavy_packages_wait_until_they_are_asked_for():
    heavy = "{'reasoning_gym', 'pyarrow', 'sympy'} & set(sys.modules)"
    code = f"import sys, fathom.envs.registry; sys.exit(', '.join({heavy}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
