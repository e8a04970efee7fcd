"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's folder, or its name (the newest run of it)")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="where runs are kept")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]

DEFAULT_RUNS_DIR = Path("runs")
