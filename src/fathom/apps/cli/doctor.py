"""`fathom doctor`."""

from __future__ import annotations

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunsDir
from fathom.bench.doctor import Finding, Verdict, examine

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "bold red"}


def doctor(runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Check whether this machine can run Fathom, and say what to do where it cannot. Exit code 1 when it cannot."""
    findings: list[Finding] = []
    with Console(stderr=True).status("looking") as status:
        for finding in examine(runs_dir):
            findings.append(finding)
            status.update(f"{finding.check}: {finding.verdict}; going on")
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"passed": not failed, "findings": findings})))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            found = Text(finding.found)
            if finding.advice:
                found.append(f"\n{finding.advice}", _STYLES[finding.verdict])
            table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.check, found)
        Console().print(table)
    raise typer.Exit(1 if failed else 0)
