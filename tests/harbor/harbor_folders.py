"""Task folders for tests."""

from __future__ import annotations

from pathlib import Path

TASK_TOML = (
    'schema_version = "1.4"\n[metadata]\nauthor = "x"\n[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 20\n'
)
DOCKERFILE = "FROM debian:12\n# data\nENV A=b\nWORKDIR /app\nCOPY data /app\n"
TEST = 'if [ "$(cat /app/out 2>/dev/null)" = 5 ]; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n'


def make_task(
    parent: Path,
    name: str = "five",
    *,
    toml: str = TASK_TOML,
    dockerfile: str = DOCKERFILE,
    test: str = TEST,
    solve: str = "wc -l < in > out\n",
) -> Path:
    """A task: count the lines of /app/in, write the number to /app/out."""
    folder = parent / name
    for path, text in {
        "task.toml": toml,
        "instruction.md": "Count the lines of in.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data/in": "1\n2\n3\n4\n5\n",
        "environment/data/sub/deep": "deep\n",
        "tests/test.sh": test,
        "solution/solve.sh": solve,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
