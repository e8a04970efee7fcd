"""Where a chain lies: named objects that are whole or absent, on any medium."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self, final

from fathom.core.errors import DeliveryError, PayloadError
from fathom.sync.chain.media.local import LocalMedium
from fathom.sync.chain.media.medium import Chunk, Medium, Stat
from fathom.sync.chain.media.objects import ObjectMedium

_NAME = re.compile(r"(links|data|leases|model|followers)/[A-Za-z0-9][A-Za-z0-9@._-]*")
_FILE_SCHEME = "file://"


@final
class Store:
    """A chain's objects, in `links/`, `data/` and `leases/`; beside them what is for those who follow it: `model/`, the
    model's config and tokenizer, and `followers/`, their reports. No name leads out of it. Calls block.

    >>> store = Store.open("memory://doc")
    >>> store.put("data/v0@1.bin", [b"abc", b"d"])
    >>> store.read("data/v0@1.bin", 1, 3)
    b'bc'
    """

    def __init__(self, medium: Medium) -> None:
        """Use `medium`, for instance one that fails on demand. See `open`."""
        self._medium = medium

    @classmethod
    def open(cls, url: str | Path) -> Self:
        """A folder (a path, or `file://`), or what fsspec reaches (`s3://bucket/prefix`, `memory://name`).

        Nothing is created before something is put.

        Raises:
            ConfigError: the scheme is unknown, or its package is not installed.
        """
        text = str(url)
        if text.startswith(_FILE_SCHEME) or "://" not in text:
            return cls(LocalMedium(Path(text.removeprefix(_FILE_SCHEME))))
        return cls(ObjectMedium(text))

    @classmethod
    def of_run(cls, run_folder: Path, store: str | None) -> Self:
        """The chain of a run: in `store` (`sync.chain.store`) below the run's name, or in its own folder."""
        return cls.open(run_folder / "chain" if store is None else f"{store.rstrip('/')}/{run_folder.absolute().name}")

    @property
    def url(self) -> str:
        """Opens the same store in another process; a local path is absolute."""
        return self._medium.url

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write an object whole and durably, or replace it.

        Raises:
            DeliveryError: the medium failed. What `chunks` itself raises goes through.
        """
        source, name = _Source(chunks), _checked(name)
        try:
            self._medium.put(name, source)
        except Exception as error:  # the boundary: every backend raises its own types
            if source.failed:
                raise
            raise DeliveryError(
                f"cannot write {name} to {self.url} ({type(error).__name__}: {error}); make room there, or look at "
                "that medium"
            ) from error

    def get(self, name: str) -> bytes:
        """A whole object. Raises `PayloadError` when it is missing or cannot be read."""
        return self._read(name, 0, None)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Exactly the bytes `start` to `stop` (exclusive). Raises `PayloadError`, also when the object is shorter."""
        found = self._read(name, start, stop)
        if len(found) != stop - start:
            raise PayloadError(f"{name} in {self.url} is cut short: it ends before byte {stop}")
        return found

    def list(self, folder: str) -> Mapping[str, Stat]:
        """The objects in one of the folders named above, by full name. Foreign ones are left out.

        Raises:
            PayloadError: the medium failed.
        """
        try:
            found = self._medium.list(folder)
        except Exception as error:  # the boundary, as above
            raise PayloadError(f"cannot list {folder} in {self.url} ({type(error).__name__}: {error})") from error
        return {name: stat for name, stat in found.items() if _NAME.fullmatch(name)}

    def delete(self, name: str) -> None:
        """Remove an object, if it is there. Raises `DeliveryError` when the medium failed."""
        name = _checked(name)
        try:
            self._medium.delete(name)
        except Exception as error:  # the boundary, as above
            raise DeliveryError(
                f"cannot remove {name} from {self.url} ({type(error).__name__}: {error}); look at that medium"
            ) from error

    def sweep(self) -> None:
        """Remove what a writer that died half-way left. Only for the single writer. Raises `DeliveryError`."""
        try:
            self._medium.sweep()
        except Exception as error:  # the boundary, as above
            raise DeliveryError(f"cannot tidy {self.url} ({type(error).__name__}: {error})") from error

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        name = _checked(name)
        try:
            return self._medium.read(name, start, stop)
        except FileNotFoundError as error:
            raise PayloadError(f"{name} is missing in {self.url}") from error
        except Exception as error:  # the boundary, as above
            raise PayloadError(f"{name} in {self.url} cannot be read ({type(error).__name__}: {error})") from error


@final
class _Source:
    """Chunks; remembers whether it was they that failed, not the medium."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self.failed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return next(self._chunks)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise AssertionError(f"{name!r} is no name of an object in a chain")
    return name
