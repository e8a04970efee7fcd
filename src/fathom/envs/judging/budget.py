"""What all graders of a run may spend together: calls and tokens, counted across their processes."""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

from fathom.core.errors import UngradedError

_USED = struct.Struct("<QQ")


@final
class Budget:
    """Counts in an unnamed file that forked processes share; the kernel lets go of its lock when one is killed.

    Graders are forked from the process that unpickled their environment, so unpickling starts a new count, and all of
    a run's graders share that one.
    """

    def __init__(self, *, max_calls: int | None, max_tokens: int | None) -> None:
        """None: no bound."""
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._open()

    @property
    def used(self) -> tuple[int, int]:
        """Calls and tokens so far."""
        calls, tokens = _USED.unpack(os.pread(self._file, _USED.size, 0))
        return calls, tokens

    def take_call(self) -> None:
        """Use one call.

        Raises:
            UngradedError: calls or tokens are used up; cause `judge_budget`. Calls that run at the same moment can
                together go beyond `max_tokens`, never beyond `max_calls`.
        """
        with self._locked():
            calls, tokens = self.used
            for what, used, most in (("calls", calls, self._max_calls), ("tokens", tokens, self._max_tokens)):
                if most is not None and used >= most:
                    raise UngradedError("judge_budget", f"all {most} {what} of the judge are used up; raise max_{what}")
            self._write(calls + 1, tokens)

    def add_tokens(self, count: int) -> None:
        """Tokens of a call, known after it."""
        with self._locked():
            calls, tokens = self.used
            self._write(calls, tokens + count)

    def __getstate__(self) -> dict[str, Any]:
        return {"_max_calls": self._max_calls, "_max_tokens": self._max_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        self._file, path = tempfile.mkstemp(prefix="fathom-budget-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self._threads = threading.Lock()
        self._write(0, 0)

    def _write(self, calls: int, tokens: int) -> None:
        os.pwrite(self._file, _USED.pack(calls, tokens), 0)

    @contextmanager
    def _locked(self) -> Generator[None]:
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
