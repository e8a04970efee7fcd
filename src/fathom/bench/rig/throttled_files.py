"""A simulated storage: files of this machine that take as long as at a stated speed.

`throttled://200/folder` is `/folder` at 200 MB/s: every read and write sleeps its bytes' time at that speed, each
process for itself, after the work that it really is. `throttled://0/folder` does not sleep.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, final

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "throttled"
_MB = 10**6


def make_known() -> None:
    """Let fsspec open such URLs in this process."""
    fsspec.register_implementation(SCHEME, ThrottledFiles, clobber=True)


def throttled_url(mb_per_s: float, folder: Path) -> str:
    """Opens `folder`, which is absolute, at this speed, where `make_known` was called. 0: at its own."""
    return f"{SCHEME}://{mb_per_s:g}{folder}"


@final
class ThrottledFiles(fsspec.AbstractFileSystem):
    """The few calls that a chain's store makes."""

    protocol = SCHEME
    cachable = False

    def __init__(self, mb_per_s: float, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._mb_per_s = mb_per_s
        self._files = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix(f"{SCHEME}://").partition("/")[2] if path.startswith(SCHEME) else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, float]:
        return {"mb_per_s": float(path.removeprefix(f"{SCHEME}://").partition("/")[0])}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file."""
        self._files.makedirs(self._parent(path), exist_ok=True)
        self._files.pipe_file(path, value)
        self._sleep(len(value))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any) -> None:
        """Copy a file in."""
        self._files.makedirs(self._parent(rpath), exist_ok=True)
        self._files.put_file(lpath, rpath)
        self._sleep(Path(lpath).stat().st_size)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read a file, or a part of it."""
        data: Any = self._files.cat_file(path, start=start, end=end)
        self._sleep(len(data))
        return data

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a folder."""
        return self._files.ls(path, detail=detail)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._files.rm_file(path)

    def _sleep(self, size_bytes: int) -> None:
        if self._mb_per_s > 0:
            time.sleep(size_bytes / _MB / self._mb_per_s)
