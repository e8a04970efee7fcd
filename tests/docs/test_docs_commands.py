"""Every `fathom ...` on a page is a command that exists, with options that exist."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT, code_lines, name_of
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fathom.apps.cli.main import app
from fathom.apps.cli.weights.group import RunFirst
from fathom.bench.workloads import WORKLOADS
from fathom.config.load import option_names
from fathom.envs.registry import BUILT_IN
from fathom.run.tuning.plan import KINDS

OPTIONS = set(option_names())
OPTIONS_OF = {kind: set(option_names(root)) for kind, root in KINDS.items()}
BENCH_OPTIONS = {name: set(workload.options.model_fields) for name, workload in WORKLOADS.items()}
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=.+")


def commands(page: Path) -> list[list[str]]:
    lines = [line.replace("...", "") for line in code_lines(page) if line.startswith("fathom ")]
    return [shlex.split(line) for line in lines]


def find(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that `words` call, and what it is given."""
    command, rest = get_command(app), words[1:]
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        rest = command.spelled_out(rest) if isinstance(command, RunFirst) else rest
        assert rest[0] in command.commands, f"{' '.join(words)}: there is no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command, rest


def is_option(name: str, known: set[str]) -> bool:
    """Tasks have options of their own; sections by chosen names are listed with a NAME in their place.

    A section is an option, too: all of it may be given at once."""
    if name.startswith("task.options.") or any(each.startswith(f"{name}.") for each in known):
        return True
    return any(fnmatchcase(name, each.replace("NAME", "*")) for each in known)


def check(words: list[str]) -> None:
    command, rest = find(words)
    flags = {spelling: option for option in command.params for spelling in option.opts if spelling.startswith("--")}
    for word in rest:
        if word.startswith("-") and not word[1:].isdigit():
            assert word in flags or word == "--help", f"{' '.join(words)}: there is no option {word}"
        if override := OVERRIDE.fullmatch(word):
            name = override[1]
            known = OPTIONS_OF.get(words[1], OPTIONS)
            if words[1] == "bench":
                known = BENCH_OPTIONS[words[2]]
            elif words[1:3] == ["tasks", "rows"]:
                known = set(BUILT_IN[words[3]][0].model_fields)
            assert is_option(name, known), f"{' '.join(words)}: there is no option {name}"
        if word.startswith("recipes/"):
            assert (ROOT / word).is_file(), f"{' '.join(words)}: there is no file {word}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        check(words)


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 30


@pytest.mark.parametrize(
    "line",
    [
        "fathom fly",
        "fathom show RUN --jason",
        "fathom train x.toml trainer.stps=3",
        "fathom bench sync hops=3",
        "fathom train recipes/x.toml",
    ],
)
def test_what_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match="there is no"):
        check(shlex.split(line))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        used = {line.split()[1] for line in code_lines(page) if re.match(r"make [a-z]", line)}
        assert used <= targets, name_of(page)
