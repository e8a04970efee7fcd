"""Runs as people start them: by the command, by a script of their own, and by what looks like one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fathom.envs.arithmetic import Arithmetic, ArithmeticOptions
from fathom.envs.written_rows import write_rows
from fathom.run.history.folder import RunFolder

SMALL = """
name = "small"
runs_dir = "runs"
[model]
tiny = "arithmetic"
[task]
kind = "arithmetic"
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 4
max_prompt_tokens = 24
[engine]
kind = "scripted"
[trainer]
steps = 2
groups_per_step = 2
"""
ADAPTERS = """
[lora]
rank = 2
[adapters.left]
[adapters.right]
"""
TUNED = """
name = "tuned"
runs_dir = "runs"
[model]
tiny = "arithmetic"
[data]
train = ["rows/train.jsonl"]
[trainer]
epochs = 1
"""
OWN = """
from pathlib import Path
import fathom

class Vowels:
    def tasks(self):
        return [fathom.Task(id=f"{n}", messages=({"role": "user", "content": f"{n}="},), answer="") for n in range(50)]
    def eval_tasks(self):
        return []
    def grade(self, task, answer):
        share = sum(letter in "aeiou" for letter in answer) / 8
        return fathom.Graded(components={"vowels": share}, grader="vowels/1", answer_found=True)

def start():
    print(fathom.Run.from_toml(Path("small.toml"), environment=Vowels()).start().reason)
"""
GUARDED = OWN + "\nif __name__ == '__main__':\n    start()\n"
UNGUARDED = OWN + "\nstart()\n"
COMMAND = [sys.executable, "-c", "from fathom.apps.cli.main import main; main()"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def call(command: list[str], here: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=here, input=text, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_a_script_with_a_class_of_its_own(here: Path) -> None:
    (here / "mine.py").write_text(GUARDED)
    done = call([sys.executable, "mine.py"], here)
    assert (done.returncode, done.stdout) == (0, "steps\n"), done.stderr


def test_a_script_without_a_guard_says_so_at_once(here: Path) -> None:
    (here / "mine.py").write_text(UNGUARDED)
    began = time.monotonic()
    done = call([sys.executable, "mine.py"], here)
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]
    assert time.monotonic() - began < 20
    assert not any((here / "runs").iterdir())


@pytest.mark.parametrize("script", [GUARDED, UNGUARDED])
def test_a_script_from_standard_input_is_refused_at_once(here: Path, script: str) -> None:
    done = call([sys.executable, "-"], here, text=script)
    assert done.returncode == 1
    assert "save it as a file" in done.stderr.splitlines()[-1]
    assert not (here / "runs").exists()


def test_a_class_without_grade_is_refused_from_python_too(here: Path) -> None:
    (here / "mine.py").write_text(GUARDED.replace("def grade", "def judge"))
    done = call([sys.executable, "mine.py"], here)
    assert "Vowels is no environment: it has no grade" in done.stderr.splitlines()[-1]


def test_train_show_resume_by_name(here: Path) -> None:
    started = call([*COMMAND, "train", "small.toml"], here)
    assert started.returncode == 0, started.stderr
    (run,) = (here / "runs").iterdir()
    assert f"fathom show runs/{run.name}" in started.stderr
    assert "step 2/2" in started.stderr

    again = call([*COMMAND, "resume", "small"], here)
    assert again.returncode == 0, again.stderr

    owner = RunFolder.open(run)
    refused = call([*COMMAND, "resume", "small"], here)
    owner.unlock()
    assert refused.returncode == 2
    assert "in use by another process" in refused.stderr


def test_ctrl_c_while_graders_start_leaves_nothing(here: Path) -> None:
    begun = here / "begun"
    slow = f"if __name__ == '__mp_main__':\n    open({str(begun)!r}, 'w').close()\n    time.sleep(60)\n"
    (here / "mine.py").write_text("import time\n" + slow + GUARDED)
    process = subprocess.Popen([sys.executable, "mine.py"], cwd=here, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun.exists(), "no grader process was started, so nothing was interrupted"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output == "stopped\n"
    assert not any((here / "runs").iterdir())


@pytest.mark.parametrize(
    ("heavy", "command"),
    [
        ("fathom.run.local", ["train", "small.toml"]),
        ("fathom.run.adapters.drive", ["train", "adapters.toml"]),
        ("fathom.run.tuning.drive", ["sft", "sft.toml"]),
    ],
)
def test_ctrl_c_while_the_heavy_half_loads_leaves_nothing(here: Path, heavy: str, command: list[str]) -> None:
    write_rows(Arithmetic(ArithmeticOptions(num_train=8, num_eval=4)), here / "rows", pairs=False, seed=0)
    (here / "adapters.toml").write_text(SMALL.replace('"scripted"', '"embedded"') + ADAPTERS)
    (here / "sft.toml").write_text(TUNED)
    pressed = f"""
import os, signal, sys
from fathom.apps.cli.main import main

class Pressed:
    def find_spec(self, name, *_):
        if name == {heavy!r}:
            os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    sys.meta_path.insert(0, Pressed())
    main()
"""
    (here / "pressed.py").write_text(pressed)
    done = call([sys.executable, "pressed.py", *command], here)
    assert done.returncode == 130, done.stderr
    assert not any((here / "runs").iterdir())
