"""Writes instances as task folders in Harbor's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fathom.core.errors import DataError
from fathom.envs.harbor.generating.draw import draw
from fathom.envs.harbor.generating.families import Instance
from fathom.envs.harbor.script import ANSWER, SCRIPT

_TOML = """\
schema_version = "1.4"

[metadata]
family = "{family}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
memory_mb = 256
storage_mb = 16
"""
_DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY files /app\n"
_TEST = """\
#!/bin/bash
# The reward is 1 if /app holds exactly the files in /tests/want, with that content (an end of line more or less is
# the same), else 0.
shopt -s globstar dotglob nullglob
list() { cd "$1" && for path in **; do [ -d "$path" ] && [ ! -h "$path" ] || echo "$path"; done; }
want=$(list /tests/want)
reward=1
[ "$(list /app)" = "$want" ] || reward=0
for file in $want; do
    [ -f "/app/$file" ] && [ ! -h "/app/$file" ] || { reward=0; continue; }
    [ "$(<"/app/$file")" = "$(<"/tests/want/$file")" ] || reward=0
done
echo $reward > /logs/verifier/reward.txt
"""


def write_tasks(folder: Path, seed: int, count: int, held_out: int, families: Sequence[str] = ()) -> None:
    """Write `count` training tasks to `folder/train` and `held_out` others to `folder/eval`.

    They are called after their number, so that the first of them, in order of their names, are of all families.

    Raises:
        DataError: `folder` has something in it. ConfigError: so many different tasks cannot be drawn, or not of
            these families.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        there = "is not empty" if folder.is_dir() else "is a file"
        raise DataError(f"{folder} {there}; name a new folder")
    train, held = draw(seed, count, held_out, families)
    _write_all(folder / "eval", held, 0)
    _write_all(folder / "train", train, held_out)


def _write_all(parent: Path, instances: Sequence[Instance], first: int) -> None:
    for number, instance in enumerate(instances, start=first):
        _write(parent / f"{number:04d}-{instance.family}", instance)


def _write(folder: Path, instance: Instance) -> None:
    solution = "".join(f"{command}\n" for command in instance.commands)
    script = {"commands": list(instance.commands), "answer": ANSWER}
    texts = {
        "task.toml": _TOML.format(family=instance.family),
        "instruction.md": instance.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST,
        "solution/solve.sh": f"#!/bin/bash\ncd /app\n{solution}",
        SCRIPT: json.dumps(script, indent=1) + "\n",
    }
    texts |= {f"environment/files/{name}": text for name, text in instance.before.items()}
    texts |= {f"tests/want/{name}": text for name, text in instance.after.items()}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
