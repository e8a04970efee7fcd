"""The run's side of a nursery: workers by number, each at the other end of a socket."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import pickle
import socket
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Any, final

from fathom.core.errors import ConfigError, GraderDeadError
from fathom.envs.nursery.keeper import ORDER, READY, Serve, Warm, keep

_READ_BYTES = 1 << 16
_CLOSE_S = 5.0
_ORDER_S = 10.0
_END_S = 10.0


@final
class Nursery:
    """Forks workers from a warm process that never loads torch, and ends them with all they started.

    A worker that ends by itself, or is killed, is noticed on its socket; it stays known until `end`.
    """

    def __init__(
        self, environment: Any, serve: Serve, *, memory_bytes: int, start_timeout_s: float, warm: Warm | None = None
    ) -> None:
        """Nothing starts yet.

        Args:
            environment: must be picklable.
            serve: what workers do with it; a function of a module.
            memory_bytes: private memory that a process may have.
            start_timeout_s: deadline of `start`.
            warm: done once, before the first worker; a function of a module. None: nothing is to be done.
        """
        self._environment = environment
        self._serve = serve
        self._warm = warm
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._control: socket.socket | None = None
        self._process: SpawnProcess | None = None
        self._begun = 0

    @property
    def is_open(self) -> bool:
        """Workers can be had."""
        return self._control is not None

    async def start(self) -> None:
        """Start, and wait until the environment is warm. Call it before torch loads.

        Raises:
            ConfigError: the environment cannot be sent to another process, or cannot be loaded there.
        """
        try:
            payload = pickle.dumps(self._environment)
        except Exception as error:  # pickle raises anything, depending on what it met
            raise ConfigError(
                f"the environment cannot be sent to a grader process: {error}. Define its class in a module and keep "
                "open files, locks and lambdas out of its attributes"
            ) from error
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self._process = multiprocessing.get_context("spawn").Process(
                target=keep,
                args=(theirs, payload, os.getpid(), self._memory_bytes, self._serve, self._warm),
                name="fathom-graders",
                daemon=True,
            )
            # On this thread, not in an executor: until it is warm, it is killed when the thread that started it ends.
            self._process.start()
        atexit.register(self._control.close)  # runs before multiprocessing's own, which waits for its children
        await self._wait_until_ready(self._control, self._process)
        self._control.settimeout(_ORDER_S)

    def begin(self) -> tuple[int, socket.socket]:
        """Order a worker: its number, and our end of its socket. What is sent waits there until the worker is there.

        Raises:
            GraderDeadError: the process that forks is gone.
        """
        self._begun += 1
        return self._begun, self._order(begins=True, number=self._begun)

    def end(self, number: int) -> None:
        """Order a worker's end, and that of all it started.

        Raises:
            GraderDeadError: the process that forks is gone, and its workers with it.
        """
        self._order(begins=False, number=number).close()

    async def ended(self, number: int) -> None:
        """Order a worker's end, and wait until it and all it started are gone. Raises as `end`."""
        with self._order(begins=False, number=number) as receipt, suppress(TimeoutError, OSError):
            async with asyncio.timeout(_END_S):
                await asyncio.get_running_loop().sock_recv(receipt, 1)

    async def close(self) -> None:
        """End all workers, and wait until they are gone. Safe to call twice."""
        if self._control is not None:
            atexit.unregister(self._control.close)
            self._control.close()
            self._control = None
        if self._process is not None:
            await asyncio.to_thread(self._process.join, _CLOSE_S)
            self._process.kill()
            self._process.join()
            self._process = None

    def _order(self, *, begins: bool, number: int) -> socket.socket:
        """Our end of the socket that goes with it."""
        if self._control is None:
            raise GraderDeadError("the environment's processes were closed")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [ORDER.pack(begins, number)], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise GraderDeadError(
                "the process that keeps the graders has ended (was it killed for memory?); resume the run"
            ) from error
        return ours

    async def _wait_until_ready(self, control: socket.socket, process: SpawnProcess) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                answer = await asyncio.get_running_loop().sock_recv(control, _READ_BYTES)
        except TimeoutError:
            raise ConfigError(
                f"the environment was not loaded in a grader process within {self._start_timeout_s:g} s; make its "
                "module and its pickled form lighter"
            ) from None
        if not answer:
            await asyncio.to_thread(process.join, _CLOSE_S)
            raise ConfigError(
                f"the grader process ended while it started (exit code {process.exitcode}); see its output above. A "
                "script that starts a run needs `if __name__ == '__main__':` around it"
            )
        if answer != READY:
            raise ConfigError(f"the environment cannot be loaded in a grader process: {answer.decode()}")
