"""What a grader's worker does: requests in, rewards out."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import suppress

import msgspec

from fathom.core.errors import UngradedError
from fathom.core.ports.environment import ComparingEnvironment, Environment, GroupGrade, GroupMember, Task
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


class CompareRequest(msgspec.Struct, frozen=True, tag="compare_request.1"):
    """What a worker is asked when a group is complete."""

    task: Task
    """The task."""
    members: tuple[GroupMember, ...]
    """Its graded members."""


def serve(environment: Environment, line: socket.socket) -> None:
    """Answer requests on `line`, each once, until it is closed or the run has died.

    Whatever the grader raises is *ungraded*.
    """
    requests = FrameReader(GradeRequest | CompareRequest)
    with suppress(ConnectionError):  # the run was killed: there is nobody to tell
        while data := line.recv(_READ_BYTES):
            for request in requests.feed(data):
                compares = isinstance(request, CompareRequest)
                line.sendall(frame(_judge_group(environment, request) if compares else judge(environment, request)))


def judge(environment: Environment, request: GradeRequest) -> Reward:
    """Grade; a failure of the grader, or a result that is not a finite `Graded`, has a cause and no reward."""
    try:
        return sound(environment.grade(request.task, request.answer))
    except UngradedError as error:
        return Ungraded(cause=error.cause, detail=error.detail)
    except BaseException as error:  # noqa: BLE001  # even SystemExit of a grader is only this sample's failure
        return Ungraded(cause="grader_error", detail=describe(error))


def _judge_group(environment: Environment, request: CompareRequest) -> GroupGrade | Ungraded:
    try:
        return asyncio.run(compare(environment, request.task, request.members))
    except UngradedError as error:
        return Ungraded(cause=error.cause, detail=error.detail)
    except BaseException as error:  # noqa: BLE001  # as above, of the group
        return Ungraded(cause="group_error", detail=describe(error))


async def compare(environment: object, task: Task, members: tuple[GroupMember, ...]) -> GroupGrade:
    """What the environment makes of a group, if it fits the group.

    Raises:
        TypeError, RecordError, ValueError: it does not, or the environment compares nothing.
    """
    if not isinstance(environment, ComparingEnvironment):
        raise TypeError(f"{type(environment).__name__} has no grade_group()")
    given = await environment.grade_group(task, members)
    if not isinstance(given, GroupGrade):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code returns anything
        raise TypeError(f"grade_group() returned {type(given).__name__}; it must return a GroupGrade")
    grade = unpack(GroupGrade, *pack(given))
    for name, values in grade.components.items():
        if len(values) != len(members):
            raise ValueError(f"grade_group() gave {len(values)} values of {name!r} to {len(members)} members")
        if any(name in member.reward.components for member in members):
            raise ValueError(f"grade_group() gave {name!r}, which members have already; give it another name")
    if any(not math.isfinite(total) for total in _totals(grade, members)):
        raise ValueError(f"a reward is not finite with what grade_group() gave: {grade.components}")
    return grade


def _totals(grade: GroupGrade, members: tuple[GroupMember, ...]) -> list[float]:
    added = list(zip(*grade.components.values(), strict=True))
    return [sum((member.reward.total, *values)) for member, values in zip(members, added, strict=True)]


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
