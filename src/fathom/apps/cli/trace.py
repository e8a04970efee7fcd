"""`fathom trace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunName, RunsDir
from fathom.core.errors import ConfigError
from fathom.core.ids import TrajectoryId
from fathom.evidence.runs import find_run, ledger_of, tokenizer_of
from fathom.evidence.trace import BranchTrace, TokenTrace, trace_step, trace_trajectory
from fathom.evidence.tuning.summary import is_tuning
from fathom.evidence.worst import NormJudged, WorstStep, WorstTuningStep, worst_steps, worst_tuning_steps
from fathom.ledger.reader import LedgerReader
from fathom.text.tokenizer import Tokenizer

_DEFAULT_LIMIT = 4
_COLUMNS = ("pos", "token", "id", "version", "KV", "logprob", "trainer", "ratio", "weight", "gradient")
_FAR_RATIO = 1.2

Step = Annotated[int | None, typer.Option("--step", help="the rows of this step [default: the newest]")]
Trajectory = Annotated[str | None, typer.Option("--trajectory", metavar="ID", help="this trajectory")]
Worst = Annotated[
    int | None,
    typer.Option(
        "--worst", min=1, metavar="N", help="the N steps with the most unusual gradients, and what is behind them"
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="rows, trajectories or samples to show of a step")]


def trace(
    run: RunName,
    step: Step = None,
    trajectory: Trajectory = None,
    worst: Worst = None,
    limit: Limit = _DEFAULT_LIMIT,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    as_json: AsJson = False,
) -> None:
    """Where tokens came from and what a step made of them."""
    if sum(given is not None for given in (step, trajectory, worst)) > 1:
        raise ConfigError("give one of --step, --trajectory and --worst")
    folder = find_run(run, runs_dir, or_tuned=worst is not None)
    with LedgerReader(ledger_of(folder)) as reader:
        if worst is not None and is_tuning(reader):
            _show_worst_tuning(worst_tuning_steps(reader, worst), limit, as_json=as_json)
            return
        if worst is not None:
            _show_worst(worst_steps(reader, worst, parts=limit), as_json=as_json)
            return
        if trajectory is not None:
            branches = trace_trajectory(reader, TrajectoryId(trajectory))
            header = None if branches else reader.trajectory(TrajectoryId(trajectory)).trajectory.header
        else:
            branches, header = trace_step(reader, step, limit=limit), None
    if as_json:
        _print_json(branches)
        return
    console, text_of = Console(), _texts(folder)
    if header is not None:
        console.print(f"{header.id}: {header.status} ({header.cause}); the model was asked nothing", markup=False)
    for branch in branches:
        console.print(_heading(branch, text_of))
        console.print(_tokens(branch, text_of))
        console.print()


def _print_json(found: Sequence[BranchTrace | WorstStep | WorstTuningStep]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found)))


def _show_worst(steps: Sequence[WorstStep], *, as_json: bool) -> None:
    if as_json:
        _print_json(steps)
        return
    console = Console()
    for step in steps:
        console.print(_norm(step.norm))
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("trajectory", no_wrap=True)  # to be copied
        for column in ("share", "reward", "advantage", "tokens", "refused", "log ratio", "weight"):
            table.add_column(column, justify="right")
        for part in step.parts:
            table.add_row(
                part.trajectory,
                "-" if part.share is None else f"{part.share:.1%}",
                "-" if part.reward is None else f"{part.reward:g}",
                f"{part.advantage:+.3f}",
                str(part.tokens),
                Text(str(part.non_finite), style="red" if part.non_finite else ""),
                "-" if part.largest_log_ratio is None else f"{part.largest_log_ratio:.3f}",
                f"{part.largest_weight:.3f}",
            )
        console.print(table)
        console.print()


def _show_worst_tuning(steps: Sequence[WorstTuningStep], limit: int, *, as_json: bool) -> None:
    if as_json:
        _print_json(steps)
        return
    console = Console()
    for step in steps:
        console.print(_norm(step.norm))
        named, more = ", ".join(map(str, step.samples[:limit])), len(step.samples) - limit
        aside = f" and {more} more (--limit)" if more > 0 else ""
        console.print(f"epoch {step.epoch}, places of its samples among those trained on: {named}{aside}")
        console.print()


def _norm(norm: NormJudged) -> Text:
    line = Text(f"step {norm.step}", style="bold")
    line.append(f", gradient {norm.grad_norm:.4g}", style="red" if norm.anomalous else "")
    if norm.ratio is not None:
        line.append(f", {norm.ratio:.2f} times the median of those before")
    if norm.robust_z is not None:
        line.append(f" (robust z {norm.robust_z:+.1f})")
    if norm.non_finite_tokens:
        line.append(f", {norm.non_finite_tokens} refused as not finite", style="red")
    return line.append(f"; {norm.why_not}" if norm.why_not else "")


def _texts(folder: Path) -> Callable[[int], str]:
    """The written form of a token id; without the run's tokenizer, nothing."""
    tokenizer = tokenizer_of(folder)
    return Tokenizer.load(tokenizer).decode_token if tokenizer is not None else lambda _: ""


def _heading(branch: BranchTrace, text_of: Callable[[int], str]) -> Text:
    heading = Text()
    heading.append(branch.trajectory, style="bold")
    heading.append(f" branch {branch.branch}" if branch.branch else "")
    heading.append(f", step {branch.step}" if branch.step is not None else ", no step", style="bold")
    reward = f"reward {branch.reward:g}" if branch.reward is not None else f"ungraded ({branch.ungraded})"
    advantage = f", advantage {branch.advantage:+.3f}" if branch.advantage is not None else ""
    heading.append(f"\n{branch.task}, {branch.status}, {reward}{advantage}")
    heading.append(
        f"\n{branch.engine}; versions {', '.join(branch.versions)}; record {branch.content_hash[:12]}", "dim"
    )
    prompt = "".join(text_of(token) for token in branch.prompt_ids)
    heading.append("\nprompt ", "dim").append(repr(prompt) if prompt else f"{len(branch.prompt_ids)} tokens", "cyan")
    return heading


def _tokens(branch: BranchTrace, text_of: Callable[[int], str]) -> RenderableType:
    table = Table(box=None, header_style="dim", pad_edge=False)
    layers = branch.route_layers
    for column in (*_COLUMNS, "routes") if layers is not None else _COLUMNS:
        table.add_column(column, justify="left" if column in ("token", "gradient") else "right")
    for token in branch.tokens:
        routes = (_routes(token, layers),) if layers is not None else ()
        table.add_row(*_cells(token, text_of), *routes, style="" if token.in_gradient else "dim")
    return table


def _routes(token: TokenTrace, layers: int) -> Text:
    """Layers in which the trainer's own choice is the recorded one, of all; `mixed` where versions changed before."""
    changes = token.route_changes
    cell = Text("-") if changes is None else Text(f"{layers - changes}/{layers}", style="yellow" if changes else "")
    return cell.append(" mixed", style="yellow") if token.mixed_routes else cell


def _cells(token: TokenTrace, text_of: Callable[[int], str]) -> tuple[Text | str, ...]:
    ratio = Text("-" if token.ratio is None else f"{token.ratio:.4f}")
    if token.ratio is not None and not 1 / _FAR_RATIO <= token.ratio <= _FAR_RATIO:
        ratio.stylize("yellow")
    kv_version = Text(f"v{token.kv_version}", style="yellow" if token.kv_version < token.version else "")
    return (
        str(token.position),
        Text(repr(text_of(token.token_id))[1:-1], style="cyan"),
        str(token.token_id),
        f"v{token.version}",
        kv_version,
        f"{token.logprob:.4f}",
        "-" if token.trainer_logprob is None else f"{token.trainer_logprob:.4f}",
        ratio,
        "-" if token.weight is None else f"{token.weight:.3f}",
        Text("yes", style="green") if token.in_gradient else Text(token.reason, style="red"),
    )
