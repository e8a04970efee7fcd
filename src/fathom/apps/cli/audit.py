"""`fathom audit`."""

from __future__ import annotations

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunName, RunsDir
from fathom.evidence.contracts.audit import audit as audit_ledger
from fathom.evidence.runs import find_run, ledger_of
from fathom.evidence.tuning.summary import audit_tuning, is_tuning
from fathom.ledger.reader import LedgerReader


def audit(run: RunName, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Examine every contract of a run again, from its ledger alone. Exit code 1 when one is broken."""
    folder = find_run(run, runs_dir)
    with LedgerReader(ledger_of(folder)) as reader:
        report = audit_tuning(reader) if is_tuning(reader) else audit_ledger(reader)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"passed": report.passed, "report": report})))
    else:
        console = Console()
        console.print(Text(f"{folder.name}: {report.steps} steps, events up to {report.last_seq}", style="bold"))
        table = Table(box=None, show_header=False)
        for check in report.checks:
            verdict = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
            detail = Text(f"{check.claim} ({check.examined:,} examined)")
            if not check.passed:
                examples = "".join(f"\n  {example}" for example in check.examples)
                detail.append(f"\n{check.failures:,} failures, such as:{examples}", style="red")
            table.add_row(verdict, check.name, detail)
        console.print(table)
    raise typer.Exit(0 if report.passed else 1)
