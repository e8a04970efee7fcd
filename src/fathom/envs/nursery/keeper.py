"""The process on the other side of a nursery: it keeps the environment warm, forks workers from it and ends them.

    run ──spawn──> keeper (environment unpickled, imports done) ──fork──> worker, worker, ...
     └──────────── one socket per worker: what is said on it is the worker's business ──┘

The keeper does nothing but fork and kill, so it never hangs, and a fresh worker costs a fork instead of seconds of
imports. It alone kills workers because it alone reaps them: no process id is ever used after it was given back.
Whatever a worker starts stays below it, however it was started, and is killed with it. When the run dies, the keeper
ends all of them; when the keeper dies, the kernel kills the workers, whatever they are busy with.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fathom.envs.nursery.offspring import adopt_orphans, children, die_with, end, end_strays, outlive

READY = b"ready"
ORDER = struct.Struct("!?Q")
"""An order: begin or end, and the worker's number. With it comes a socket: the worker's, or one that is closed once the
worker and all it started are gone."""
Serve = Callable[[Any, socket.socket], None]
"""What a worker does with the environment and its socket, until it is killed or the socket is closed."""
Warm = Callable[[], None]
"""Loads what every worker would otherwise load for itself."""

_DETAIL_CHARS = 2000
_LOOK_S = 2.0


def keep(
    control: socket.socket, payload: bytes, parent: int, memory_bytes: int, serve: Serve, warm: Warm | None
) -> None:
    """Run until `control` is closed, or the run has died.

    Says `READY` on `control` once the environment is there, or the reason why it is not. Then it takes orders.

    Args:
        control: stream socket to the run.
        payload: the pickled environment; it comes from the parent process only.
        parent: the run's process id.
        memory_bytes: private memory that a worker may have, and each process that it starts.
        serve: what workers do.
        warm: done once, before the first worker. None: nothing is to be done.
    """
    die_with(parent)
    adopt_orphans()
    for request_to_stop in (signal.SIGINT, signal.SIGTERM):  # often sent to the whole group: the run decides
        signal.signal(request_to_stop, signal.SIG_IGN)
    try:
        environment: Any = pickle.loads(payload)
        if warm is not None:
            warm()
    except Exception as error:  # noqa: BLE001  # user code may fail in any way; the run turns the text into an error
        control.sendall(describe(error).encode(errors="replace"))
        return
    own = children()  # what the environment started when it was loaded
    try:
        control.sendall(READY)
    except BrokenPipeError:  # the run gave up while this started
        return
    outlive()
    gc.collect()
    gc.freeze()  # a worker that collects would copy every page of what it shares with this process
    workers: dict[int, int] = {}
    while (order := _next_order(control, parent)) is not None:
        begins, number, line = order
        with line:
            if begins:
                workers[number] = _fork(environment, line, control, memory_bytes, serve)
            elif number in workers:
                end(workers.pop(number))
                end_strays(own | set(workers.values()))
    for worker in workers.values():
        end(worker)
    end_strays(set())


def describe(error: BaseException) -> str:
    """The error and where it was raised, short and safe to send."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = "".join(traceback.format_exception_only(error)).strip()[:_DETAIL_CHARS]
    return (text + where).encode(errors="backslashreplace").decode()


def _next_order(control: socket.socket, parent: int) -> tuple[bool, int, socket.socket] | None:
    """None: there will be no more."""
    while not select.select([control], [], [], _LOOK_S)[0]:
        if os.getppid() != parent:
            return None
    message, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1)
    if len(message) != ORDER.size:
        return None
    begins, number = ORDER.unpack(message)
    os.set_inheritable(descriptors[0], False)  # what came over a socket would be every program's that a worker starts
    return begins, number, socket.socket(fileno=descriptors[0])


def _fork(environment: Any, line: socket.socket, control: socket.socket, memory_bytes: int, serve: Serve) -> int:
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        with suppress(ProcessLookupError, PermissionError):  # it may have ended already, or set its group itself
            os.setpgid(worker, worker)
        return worker
    try:
        die_with(keeper)
        adopt_orphans()
        os.setpgid(0, 0)  # what a worker starts is in its group and ends with it
        control.close()
        _limit_memory(memory_bytes)
        serve(environment, line)
    except BaseException:  # noqa: BLE001  # a forked child must never return into the keeper's loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _limit_memory(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
