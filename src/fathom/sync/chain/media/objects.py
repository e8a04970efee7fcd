"""Objects in whatever fsspec reaches: `s3://`, `gs://`, `memory://`, ..."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import fsspec

from fathom.core.errors import ConfigError
from fathom.sync.chain.media.medium import Chunk, Stat

_SPILL_BYTES = 64 << 20
_STAMPS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
"""What backends call the moment or identity of a write."""


@final
class ObjectMedium:
    """One PUT per object, which stores do as a whole. Credentials are fsspec's own business: its environment."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` when the scheme is unknown or its package is not installed."""
        self._url = url.rstrip("/")
        try:
            # Listings must be fresh: other processes write to the same store.
            found = fsspec.url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"sync.chain.store = {url!r} cannot be opened: {error}; install the fsspec package of that scheme, or "
                "name a folder"
            ) from None
        self._files: Any = found[0]
        self._root = str(found[1]).rstrip("/")

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See `Medium.put`. What is large is gathered in a file of this host first."""
        parts: list[bytes] = []
        size_bytes = 0
        rest = iter(chunks)
        for chunk in rest:
            parts.append(bytes(chunk))
            size_bytes += len(parts[-1])
            if size_bytes > _SPILL_BYTES:
                self._put_large(name, parts, rest)
                return
        self._files.pipe_file(self._path(name), b"".join(parts))

    def read(self, name: str, start: int, stop: int | None) -> bytes:
        """See `Medium.read`."""
        return bytes(self._files.cat_file(self._path(name), start=start, end=stop))

    def list(self, folder: str) -> Mapping[str, Stat]:
        """See `Medium.list`."""
        try:
            entries = self._files.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        found: dict[str, Stat] = {}
        for entry in entries:
            file = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry.get("type") == "file" and file:
                stamp = "-".join(str(entry[key]) for key in _STAMPS if key in entry)
                found[f"{folder}/{file}"] = Stat(size_bytes=int(entry["size"]), stamp=stamp)
        return found

    def delete(self, name: str) -> None:
        """See `Medium.delete`."""
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def sweep(self) -> None:
        """Nothing: a PUT that was not completed has no name."""

    def _put_large(self, name: str, first: list[bytes], rest: Iterator[Chunk]) -> None:
        with tempfile.NamedTemporaryFile() as file:
            for chunk in first:
                file.write(chunk)
            for chunk in rest:
                file.write(chunk)
            file.flush()
            self._files.put_file(file.name, self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
