"""Graders that misbehave on demand: the answer says how."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

from fathom.core.ids import TaskId
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded

TASK = Task(id=TaskId("t"), messages=({"role": "user", "content": "?"},), answer="")


def reward(value: float) -> Graded:
    return Graded(components={"score": value}, grader="hostile/1", answer_found=True)


def loop_for_ever():
    while True:
        pass


def build_a_huge_power():
    import sympy

    return sympy.Integer(7) ** sympy.Integer(9) ** 12 % 3


def leave_a_child_behind():
    subprocess.Popen(["sleep", "1234.5"])
    time.sleep(60)


def eat_memory():
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def tampered_reward():
    graded = reward(1.0)
    graded.components["score"] = float("nan")
    return graded


DEEDS = {
    "loop": loop_for_ever,
    "regex": lambda: re.fullmatch(r"(a+)+b", "a" * 64),
    "sleep": lambda: time.sleep(60),
    "power": build_a_huge_power,
    "signals": ignore_signals,
    "child": leave_a_child_behind,
    "exit": lambda: os._exit(1),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "memory": eat_memory,
    "raise": lambda: 1 / 0,
    "sys_exit": lambda: sys.exit(3),
    "surrogate": lambda: int("\ud800"),
    "float": lambda: 1.0,
    "none": lambda: None,
    "text": lambda: Graded(components={"score": "1"}, grader="g", answer_found=True),  # type: ignore[dict-item]
    "nan": lambda: reward(float("nan")),
    "tampered": tampered_reward,
    "overflow": lambda: Graded(components={"a": 1e308, "b": 1e308}, grader="g", answer_found=True),
    "pid": lambda: reward(float(os.getpid())),
    "modules": lambda: reward(float(any(name in sys.modules for name in ("torch", "transformers")))),
    "good": lambda: reward(1.0),
}


class Hostile:
    def tasks(self):
        return (TASK,)

    def eval_tasks(self):
        return ()

    def grade(self, task, answer):
        return DEEDS[answer]()


class Unpicklable(Hostile):
    def __init__(self):
        self.deed = lambda: None


class ExplodesElsewhere(Hostile):
    def __reduce__(self):
        return int, ("no number",)


class VanishesElsewhere(Hostile):
    def __reduce__(self):
        return os._exit, (7,)


if __name__ == "__main__":
    import asyncio

    from fathom.envs.grading import Grader

    async def main() -> None:
        """Print the workers' process ids, then keep one of them busy for ever."""
        async with Grader(Hostile(), workers=2, timeout_s=60.0) as grader:
            loop = asyncio.get_running_loop()
            busy = loop.create_task(grader.grade(TASK, sys.argv[1]))
            await asyncio.sleep(0.1)
            worker = await grader.grade(TASK, "pid")
            print(int(worker.total), flush=True)  # type: ignore[union-attr]
            await busy

    signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in a shell's background ignores it
    asyncio.run(main())
