"""Rows of a JSONL or Parquet file, with the number that a person finds them by."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from fathom.core.errors import DataError, MissingDependencyError

FileRow = dict[str, Any]
"""One row as the file has it: nested values of any JSON type, by column."""


def read_rows(path: Path, limit: int | None = None) -> list[tuple[int, FileRow]]:
    """(row number from 1, row) of each of the first `limit` rows. In JSONL the number is the line's.

    Raises:
        DataError: missing, empty or unreadable file, unknown suffix, or a line that is no JSON object.
        MissingDependencyError: Parquet without pyarrow.
    """
    if not path.is_file():
        raise DataError(f"no data file {path}" + (" (it is a folder)" if path.is_dir() else f" in {Path.cwd()}"))
    match path.suffix:
        case ".jsonl":
            rows = list(islice(_json_lines(path), limit))
        case ".parquet":
            rows = list(islice(enumerate(_parquet_rows(path), start=1), limit))
        case suffix:
            raise DataError(f"{path}: suffix {suffix!r} is not known; use .jsonl (one JSON object a line) or .parquet")
    if not rows:
        raise DataError(f"{path}: the file has no rows")
    return rows


def lookup(row: FileRow, column: str) -> Any:
    """The value under a dotted name; a column whose own name has dots is found too. Raises KeyError."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inner = row[head]
    if not dot or not isinstance(inner, dict):
        raise KeyError(column)
    return lookup(inner, rest)


def column_names(row: FileRow, prefix: str = "") -> list[str]:
    """Dotted names of all columns, in the row's order."""
    names: list[str] = []
    for name, value in row.items():
        names += column_names(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return names


def _json_lines(path: Path) -> Iterator[tuple[int, FileRow]]:
    decoder = msgspec.json.Decoder(FileRow)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, decoder.decode(line.strip().removeprefix(b"\xef\xbb\xbf"))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: row {number} is not a JSON object: {error}") from error


def _parquet_rows(path: Path) -> Iterator[FileRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"reading {path}", "pyarrow", "parquet") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
