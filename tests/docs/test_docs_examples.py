"""Configs on the pages are valid, and Python on the pages runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import PAGES, ROOT, Block, blocks, name_of

from fathom.config.load import parse_config
from fathom.run.tuning.plan import KINDS, parse_tuning
from synthetic.history import write_run

CONFIGS = blocks("toml")
PYTHON = blocks("python")
WITH_PYTHON = [page for page in PAGES if blocks("python", page)]
RUN_EACH_TIME = ROOT / "README.md"
WHOLE = {"name", "model", "task", "rollout", "trainer"}
REPLACED = ("model", "task")


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the sections of `change` in it; a model or a task is replaced whole."""
    result = dict(base)
    for key, value in change.items():
        inner = isinstance(value, dict) and key not in REPLACED and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if inner else value
    return result


@pytest.mark.parametrize("block", CONFIGS, ids=lambda block: block.id)
def test_configs_are_valid(block: Block) -> None:
    """A part of a config must be valid in the demo's."""
    tree = tomllib.loads(block.text)
    if tree.get("kind") in KINDS:
        parse_tuning(tree, block.id, tree["kind"])
        return
    if not tree.keys() >= WHOLE:
        recipe = tomllib.loads((ROOT / "recipes" / "arithmetic.toml").read_text())
        tree = merged(recipe, tree)
    parse_config(tree, block.id)


def cost(page: Path) -> Any:
    """A page that trains is `slow`, but for one."""
    trains = any(".start()" in block.text for block in blocks("python", page))
    return pytest.param(page, marks=[pytest.mark.slow] if trains and page != RUN_EACH_TIME else [])


@pytest.mark.parametrize("page", [cost(page) for page in WITH_PYTHON], ids=name_of)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """All blocks of a page, in a folder with the files it names and with a run; those that train take two steps."""
    write_run(tmp_path / "runs" / "arithmetic-20250101-120000", steps=40)
    for script in files_of(page, tmp_path):
        run(tmp_path, script)


@pytest.mark.parametrize("block", [block for block in CONFIGS if block.name], ids=lambda block: block.id)
def test_named_configs_resolve(block: Block, tmp_path: Path) -> None:
    """With the classes of their page beside them."""
    files_of(block.page, tmp_path)
    run(tmp_path, "-c", "from fathom.apps.cli.main import main; main()", "train", block.name, "--dry-run")


def files_of(page: Path, folder: Path) -> list[str]:
    """Write the blocks of a page into files; returns the names of those in Python."""
    for block in blocks("toml", page):
        if block.name:
            (folder / block.name).write_text(shortened(block.text))
    scripts = [(block.name or f"block_{number}.py", block) for number, block in enumerate(blocks("python", page))]
    for name, block in scripts:
        (folder / name).write_text(shortened(block.text))
    return [name for name, _ in scripts]


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def shortened(text: str) -> str:
    """The same with two steps instead of many."""
    return re.sub(r'(?<![_\w])(steps"?(?:: | ?= ?))\d+', r"\g<1>2", text)


def test_steps_are_shortened() -> None:
    assert shortened('{"steps": 60}') == '{"steps": 2}'
    assert shortened("steps = 50") == "steps = 2"
    assert shortened('["trainer.steps=10"]') == '["trainer.steps=2"]'
    assert shortened("every_steps = 20") == "every_steps = 20"


def test_the_shown_columns_are_found(tmp_path: Path) -> None:
    from fathom.envs.registry import build_environment

    (block,) = blocks("json", ROOT / "docs" / "how-to" / "data-files.md")
    (tmp_path / "train.jsonl").write_text(block.text)
    (task,) = build_environment("rows", {"path": str(tmp_path / "train.jsonl")}).tasks()
    assert task.answer.endswith("#### 7")
