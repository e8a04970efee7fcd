"""What a grader's worker does: requests in, rewards out."""

from __future__ import annotations

import math
import socket

import msgspec

from fathom.core.ports.environment import Environment, Task
from fathom.core.records.trajectory import Graded, Reward, Ungraded
from fathom.core.wire import FrameReader, frame, pack, unpack
from fathom.envs.nursery.keeper import describe

_READ_BYTES = 1 << 16


class GradeRequest(msgspec.Struct, frozen=True, tag="grade_request.1"):
    """What a worker is asked."""

    task: Task
    """The task."""
    answer: str
    """The policy's answer to it."""


def serve(environment: Environment, line: socket.socket) -> None:
    """Answer requests on `line`, one reward each, until it is closed. Whatever the grader raises is *ungraded*."""
    requests = FrameReader(GradeRequest)
    while data := line.recv(_READ_BYTES):
        for request in requests.feed(data):
            line.sendall(frame(judge(environment, request)))


def judge(environment: Environment, request: GradeRequest) -> Reward:
    """Grade; a failure of the grader, or a result that is not a finite `Graded`, has a cause and no reward."""
    try:
        return sound(environment.grade(request.task, request.answer))
    except BaseException as error:  # noqa: BLE001  # even SystemExit of a grader is only this sample's failure
        return Ungraded(cause="grader_error", detail=describe(error))


def sound(given: Graded) -> Graded:
    """What a grader gave, if it is a reward.

    Raises:
        TypeError, RecordError, ValueError: it is not a finite `Graded`.
    """
    if not isinstance(given, Graded):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code returns anything
        raise TypeError(f"grade() returned {type(given).__name__}; it must return a Graded")
    graded = unpack(Graded, *pack(given))
    if not math.isfinite(graded.total):
        raise ValueError(f"the reward is not finite: {graded.components}")
    return graded
