"""A solved dialogue for a supervised warm start: the commands that a task's script lists, with what they really print.

solution/dialogue.json:  {"commands": ["wc -l < a", "echo 7 > b"], "answer": "done"}
"""

from __future__ import annotations

import json
from typing import final

import msgspec

from fathom.core.errors import DataError
from fathom.core.ports.agent import Acting, Endpoint, Transcript
from fathom.core.records.message import Message, Role, ToolCall
from fathom.envs.harbor.actors import told
from fathom.envs.harbor.admission import ROOM
from fathom.envs.harbor.episode import HarborEpisode
from fathom.envs.harbor.folder import HarborTask
from fathom.envs.sandbox import Sandbox

SCRIPT = "solution/dialogue.json"
"""Where a script lies in a task folder."""
ANSWER = "done"
"""What generated scripts say at the end."""

_NO_MODEL = Endpoint(base_url="http://127.0.0.1:9", key="none", model="none")
_COMMAND_S = 30.0


class _Script(msgspec.Struct, forbid_unknown_fields=True):
    commands: list[str]
    answer: str


@final
class _Scripted:
    """Gives the script's commands, one a turn, and notes down the dialogue as `BashAgent` would have had it."""

    def __init__(self, script: _Script, system: str) -> None:
        self._script = script
        self._system = system
        self.messages: list[Message] = []

    async def __call__(self, task: HarborTask, sandbox: Sandbox, endpoint: Endpoint) -> None:
        if self._system:
            self.messages.append(Message(role=Role.SYSTEM, content=self._system))
        self.messages.append(Message(role=Role.USER, content=task.instruction))
        for number, command in enumerate(self._script.commands):
            call = ToolCall(id=f"call_{number}", name="bash", arguments=json.dumps({"command": command}))
            self.messages.append(Message(role=Role.ASSISTANT, content="", tool_calls=(call,)))
            printed = told(await sandbox.run(command, _COMMAND_S))
            self.messages.append(Message(role=Role.TOOL, content=printed, tool_call_id=call.id))
        self.messages.append(Message(role=Role.ASSISTANT, content=self._script.answer))


async def solved_dialogue(task: HarborTask, system: str = "") -> tuple[Message, ...]:
    """Play the task's script in a sandbox, and return the dialogue, from the system prompt to the last answer.

    Args:
        task: has a `solution/dialogue.json`.
        system: system prompt, as the environment's option. Empty: none.

    Raises:
        DataError: there is no script, or it does not get reward 1. VerifierError, SandboxError: no reward.
    """
    path = task.folder / SCRIPT
    try:
        script = msgspec.json.decode(path.read_bytes(), type=_Script)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path} is no script of a dialogue: {error}") from error
    actor = _Scripted(script, system)
    episode = HarborEpisode(task, ROOM, actor)
    try:
        await episode.boot()
        await episode.act(_NO_MODEL)
        ended = Transcript(messages=tuple(actor.messages), finish_reasons=(), acting=Acting.ENDED, detail="")
        reward = (await episode.grade(ended)).total
    finally:
        await episode.close()
    if reward != 1.0:
        raise DataError(f"{path}: the dialogue gets reward {reward:g}, not 1")
    return ended.messages
