"""What an operator asks of a run that goes on: one small file each in the run's folder, answered by another.

<id>.request.json   written whole by `fathom fleet join` and `leave`
<id>.answer.json    written whole by the run; the request is removed
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from secrets import token_hex
from typing import Self, final

import msgspec

_REQUEST, _ANSWER = ".request.json", ".answer.json"


class JoinRequest(msgspec.Struct, frozen=True, tag="join_request.1"):
    """Start one more engine."""


class LeaveRequest(msgspec.Struct, frozen=True, tag="leave_request.1"):
    """Let an engine go."""

    engine: str
    """Which one."""
    within_s: float
    """Seconds for its generations to end; what has not ended by then is discarded."""


class Answer(msgspec.Struct, frozen=True, tag="answer.1"):
    """What became of a request."""

    done: bool
    """False: it was refused or failed; nothing changed."""
    text: str
    """For people."""


class Unreadable(msgspec.Struct, frozen=True, tag="unreadable.1"):
    """A file that is no request. Never written; what `RequestBox.take` makes of such a file."""

    why: str
    """What is wrong with it."""


Request = JoinRequest | LeaveRequest


@final
class RequestBox:
    """Both ends of the folder. Who may write it may ask."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: set[str] = set()

    @classmethod
    def of(cls, run: Path) -> Self:
        """The box of a run's folder."""
        return cls(run / "requests")

    def open(self) -> None:
        """Begin to listen. What lies there was meant for an earlier process: it is refused, and old answers removed."""
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob(f"*{_ANSWER}"):
            path.unlink(missing_ok=True)
        for name, _ in self.take():
            self.reply(name, Answer(done=False, text="asked before the run listened; ask again"))

    def post(self, request: Request) -> str:
        """Ask; returns the id under which the answer will lie."""
        self._folder.mkdir(exist_ok=True)
        name = f"{time.time_ns()}-{token_hex(4)}"
        self._write(name + _REQUEST, request)
        return name

    def take(self) -> list[tuple[str, Request | Unreadable]]:
        """Requests that were not taken yet, oldest first."""
        found: list[tuple[str, Request | Unreadable]] = []
        for path in sorted(self._folder.glob(f"*{_REQUEST}")):
            name = path.name.removesuffix(_REQUEST)
            if name not in self._taken:
                self._taken.add(name)
                found.append((name, _read(path)))
        return found

    def reply(self, name: str, answer: Answer) -> None:
        """Answer a request that was taken."""
        self._write(name + _ANSWER, answer)
        (self._folder / (name + _REQUEST)).unlink(missing_ok=True)

    def answer(self, name: str) -> Answer | None:
        """The answer, handed out once. None: not yet."""
        path = self._folder / (name + _ANSWER)
        if not path.is_file():
            return None
        answer = msgspec.json.decode(path.read_bytes(), type=Answer)
        path.unlink(missing_ok=True)
        return answer

    def _write(self, name: str, record: msgspec.Struct) -> None:
        """Whole or not at all."""
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_bytes(msgspec.json.encode(record))
        os.replace(unfinished, self._folder / name)


def _read(path: Path) -> Request | Unreadable:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Request)
    except (OSError, msgspec.DecodeError) as error:
        return Unreadable(why=str(error))
