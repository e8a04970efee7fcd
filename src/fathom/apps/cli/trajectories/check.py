"""`fathom trajectories check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.core.errors import DataError, FathomError
from fathom.text.atif.document import read_file
from fathom.text.atif.rows import demonstrations_of

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="ATIF files")]


def check(files: Files) -> None:
    """Say what of ATIF files can be trained as supervised data, and why not. Exit code 1 unless all of each can be."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("file", "rows", "tokens", "with loss", "why not"):
        table.add_column(title, overflow="fold", justify="left" if title in ("file", "why not") else "right")
    refused = 0
    for file in files:
        try:
            rows = demonstrations_of(read_file(file), file.name)
        except DataError as error:
            refused += 1
            table.add_row(Text(file.name), "0", "-", "-", Text(str(error)))
        else:
            tokens, trained = sum(len(row.token_ids) for row in rows), sum(int(row.loss_mask.sum()) for row in rows)
            table.add_row(Text(file.name), f"{len(rows)}", f"{tokens:,}", f"{trained:,}", "")
    Console().print(table)
    if refused:
        raise FathomError(f"{refused} of {len(files)} files make no rows; the table says why")
