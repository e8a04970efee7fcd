"""How a task is solved, for a supervised warm start: the commands to give, one a turn, and the last words.

solution/dialogue.json:  {"commands": ["wc -l < a", "echo 7 > b"], "answer": "done"}
"""

from __future__ import annotations

import msgspec

from fathom.core.errors import DataError
from fathom.core.records.message import Message
from fathom.envs.agents.script import calls, says
from fathom.envs.harbor.actors import BASH
from fathom.envs.harbor.folder import HarborTask

SCRIPT = "solution/dialogue.json"
"""Where it lies in a task folder."""
ANSWER = "done"
"""The last words of generated scripts."""


class _Script(msgspec.Struct, forbid_unknown_fields=True):
    commands: list[str]
    answer: str


def read_script(task: HarborTask) -> tuple[Message, ...]:
    """A model's answers, as `BashAgent` would hear them. What the commands print is not among them: they are run.

    Raises:
        DataError: there is no script.
    """
    path = task.folder / SCRIPT
    try:
        script = msgspec.json.decode(path.read_bytes(), type=_Script)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path} is no script of a dialogue: {error}") from error
    return (*(calls(BASH, command=command) for command in script.commands), says(script.answer))
