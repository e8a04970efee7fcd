"""The other side of the grader: one process that keeps the environment warm and forks a worker per slot from it.

    run ──spawn──> nursery (environment unpickled, imports done) ──fork──> worker 0, worker 1, ...
     └──────────── one socket per worker: request in, reward out ──────────────┘

The nursery does nothing but fork and kill, so it never hangs, and a fresh worker costs a fork instead of seconds of
imports. It alone kills workers because it alone reaps them: no process id is ever used after it was given back.
When the run dies, the kernel kills the nursery, and then the workers, whatever they are busy with.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress

import msgspec

from fathom.core.ports.environment import Environment, Task
from fathom.core.records.trajectory import Graded, Reward, Ungraded
from fathom.core.wire import FrameReader, frame, pack, unpack

READY = b"ready"
_PR_SET_PDEATHSIG = 1
_DETAIL_CHARS = 2000
_READ_BYTES = 1 << 16


class GradeRequest(msgspec.Struct, frozen=True, tag="grade_request.1"):
    """What a worker is asked."""

    task: Task
    """The task."""
    answer: str
    """The policy's answer to it."""


def keep(control: socket.socket, payload: bytes, parent: int, memory_bytes: int) -> None:
    """Run the nursery until `control` is closed.

    Says `READY` on `control` once the environment is there, or the reason why it is not. Then each message is one
    byte, the slot, with one socket: end that slot's worker (if there is one) and fork another that serves the socket.

    Args:
        control: stream socket to the run.
        payload: the pickled environment; it comes from the parent process only.
        parent: the run's process id.
        memory_bytes: private memory that a worker may have.
    """
    _die_with(parent)
    for request_to_stop in (signal.SIGINT, signal.SIGTERM):  # often sent to the whole group: the run decides
        signal.signal(request_to_stop, signal.SIG_IGN)
    try:
        environment: Environment = pickle.loads(payload)
    except Exception as error:  # noqa: BLE001  # user code may fail in any way; the run turns the text into an error
        control.sendall(describe(error).encode(errors="replace"))
        return
    try:
        control.sendall(READY)
    except BrokenPipeError:  # the run gave up while this started
        return
    workers: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        slot = message[0]
        if slot in workers:
            _end(workers.pop(slot))
        with socket.socket(fileno=descriptors[0]) as line:
            workers[slot] = _fork(environment, line, control, memory_bytes)
    for worker in workers.values():
        _end(worker)


def serve(environment: Environment, line: socket.socket) -> None:
    """Answer requests on `line`, one reward each, until it is closed. Whatever the grader raises is *ungraded*."""
    requests = FrameReader(GradeRequest)
    while data := line.recv(_READ_BYTES):
        for request in requests.feed(data):
            line.sendall(frame(judge(environment, request)))


def judge(environment: Environment, request: GradeRequest) -> Reward:
    """Grade; a failure of the grader, or a result that is not a finite `Graded`, has a cause and no reward."""
    try:
        given = environment.grade(request.task, request.answer)
        if not isinstance(given, Graded):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code returns anything
            raise TypeError(f"grade() returned {type(given).__name__}; it must return a Graded")
        graded = unpack(Graded, *pack(given))
        if not math.isfinite(graded.total):
            raise ValueError(f"the reward is not finite: {graded.components}")
    except BaseException as error:  # noqa: BLE001  # even SystemExit of a grader is only this sample's failure
        return Ungraded(cause="grader_error", detail=describe(error))
    return graded


def describe(error: BaseException) -> str:
    """The error and where it was raised, short and safe to send."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = "".join(traceback.format_exception_only(error)).strip()[:_DETAIL_CHARS]
    return (text + where).encode(errors="backslashreplace").decode()


def _fork(environment: Environment, line: socket.socket, control: socket.socket, memory_bytes: int) -> int:
    nursery = os.getpid()
    worker = os.fork()
    if worker:
        with suppress(ProcessLookupError, PermissionError):  # it may have ended already, or set its group itself
            os.setpgid(worker, worker)
        return worker
    try:
        _die_with(nursery)
        os.setpgid(0, 0)  # what a grader starts is in its group and ends with it
        control.close()
        _limit_memory(memory_bytes)
        serve(environment, line)
    except BaseException:  # noqa: BLE001  # a forked child must never return into the nursery's loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _limit_memory(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _end(worker: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` (strictly: the thread of it that started us) ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
