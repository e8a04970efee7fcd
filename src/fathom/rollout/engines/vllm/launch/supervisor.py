"""Runs a command in a process group of its own and ends the whole group when standard input closes or
the parent is gone.

`python supervisor.py COMMAND ...` is how vLLM's several processes end with their parent, however that one ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time

_TERMINATE_S = 3.0
_LOOK_S = 0.05
_WATCH_S = 0.5
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


def main() -> int:
    """Return the command's exit code, or 128 and the signal that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_supervisor
    )
    signal.signal(signal.SIGTERM, lambda signum, frame: _end(process.pid))
    threading.Thread(target=_end_with_parent, args=(process.pid,), daemon=True).start()
    code = process.wait()
    _end(process.pid)
    return code if code >= 0 else 128 - code


def _end_with_supervisor() -> None:
    """Should this process be killed, the kernel kills the command; its own children end when it is gone."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _end_with_parent(group: int) -> None:
    """A process forked from the parent may hold the other end of standard input open, so the parent is watched too."""
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], _WATCH_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    _end(group)


def _end(group: int) -> None:
    """Ask every process of the group to end, then make it."""
    give_up = time.monotonic() + _TERMINATE_S
    try:
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < give_up:
            time.sleep(_LOOK_S)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
