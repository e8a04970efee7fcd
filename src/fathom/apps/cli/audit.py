"""`fathom audit`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunName, RunsDir
from fathom.evidence.contracts.audit import AuditReport
from fathom.evidence.contracts.audit import audit as audit_ledger
from fathom.evidence.runs import adapters_of, find_folder, ledger_of
from fathom.evidence.tuning.summary import audit_tuning, is_tuning
from fathom.ledger.reader import LedgerReader


def audit(run: RunName, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Examine every contract of a run again, from its ledger alone. Exit code 1 when one is broken."""
    folder = find_folder(run, runs_dir)
    adapters = adapters_of(folder)
    reports = {name: _report(path) for name, path in (adapters or {folder.name: folder}).items()}
    passed = all(report.passed for report in reports.values())
    if as_json:
        told = {"adapters": reports} if adapters else {"report": reports[folder.name]}
        typer.echo(msgspec.json.format(msgspec.json.encode({"passed": passed, **told})))
    else:
        console = Console()
        for name, report in reports.items():
            _print(console, f"{folder.name}/{name}" if adapters else name, report)
    raise typer.Exit(0 if passed else 1)


def _report(folder: Path) -> AuditReport:
    with LedgerReader(ledger_of(folder)) as reader:
        return audit_tuning(reader) if is_tuning(reader) else audit_ledger(reader)


def _print(console: Console, name: str, report: AuditReport) -> None:
    console.print(Text(f"{name}: {report.steps} steps, events up to {report.last_seq}", style="bold"))
    table = Table(box=None, show_header=False)
    for check in report.checks:
        verdict = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        detail = Text(f"{check.claim} ({check.examined:,} examined)")
        if not check.passed:
            examples = "".join(f"\n  {example}" for example in check.examples)
            detail.append(f"\n{check.failures:,} failures, such as:{examples}", style="red")
        table.add_row(verdict, check.name, detail)
    console.print(table)
