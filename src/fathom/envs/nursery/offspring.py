"""What a process has forked: ended with all that it started, and gone when its parent is.

Only the standard library may be imported here: it is loaded in other Python environments, too, by its place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end(process: int) -> None:
    """End a child and its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def end_strays(others: set[int]) -> None:
    """End what a child that ended has left behind in other groups: it is a child of this process now."""
    while strays := children() - others:
        for stray in strays:
            with suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(stray, 0)


def children() -> set[int]:
    """Direct children of this process, ended ones that nobody waited for included."""
    me, found = os.getpid(), set[int]()
    if sys.platform != "linux":
        return found
    with suppress(FileNotFoundError):  # a kernel without it, or a thread that ended just now: look at every process
        lists = [thread / "children" for thread in Path("/proc/self/task").iterdir()]
        return {int(child) for each in lists for child in each.read_text().split()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == me:
                    found.add(int(entry.name))
    return found


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` (strictly: the thread of it that started us) ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive() -> None:
    """Undo `die_with`: the parent's end is heard of in another way, and there is something to end first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """What loses its parent below this process becomes its child, and not init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
