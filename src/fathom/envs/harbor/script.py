"""How a task is solved, for a supervised warm start: the commands to give, one a turn, and the last words.

solution/dialogue.json:  {"commands": ["wc -l < a", "echo 7 > b"], "answer": "done"}
"""

from __future__ import annotations

import json

import msgspec

from fathom.core.errors import DataError
from fathom.core.records.message import Message, Role, ToolCall
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
    calls = [
        ToolCall(id=f"call_{number}", name=BASH, arguments=json.dumps({"command": command}, ensure_ascii=False))
        for number, command in enumerate(script.commands)
    ]
    asking = [Message(role=Role.ASSISTANT, content="", tool_calls=(call,)) for call in calls]
    return (*asking, Message(role=Role.ASSISTANT, content=script.answer))
