"""The summary of a run that tunes, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.summary_view import curve, unusual_steps
from fathom.evidence.runs import RunListing
from fathom.evidence.tuning.summary import TuningSummary

_NAMES = {"sft": ("supervised fine-tuning", "conversations"), "dpo": ("preference training", "pairs")}


def tuning_sections(run: RunListing, summary: TuningSummary) -> Iterator[RenderableType]:
    """The parts of the page."""
    yield _header(run, summary)
    if summary.supervised_evaluations or summary.preference_evaluations:
        yield _evaluations(summary)
    yield _books(summary)


def _header(run: RunListing, summary: TuningSummary) -> RenderableType:
    facts = summary.prepared
    what, samples = _NAMES[facts.kind]
    table = _facts(run.name)
    resumed = f", resumed {summary.incarnations - 1} times" if summary.incarnations > 1 else ""
    table.add_row("state", f"{what}: {run.state}{resumed}")
    asides = {
        "left out as too long": facts.left_out,
        "truncated": facts.truncated,
        "left out as held out too": facts.also_held_out,
    }
    aside = "".join(f", {count:,} {why}" for why, count in asides.items() if count)
    table.add_row(
        "data",
        f"{facts.samples:,} {samples} in {facts.rows:,} sequences, {facts.tokens:,} tokens, {facts.loss_tokens:,} with "
        f"loss; {facts.held_out:,} held out{aside}",
    )
    if summary.warm_start is not None:
        steps, loss = summary.warm_start
        table.add_row("warm start", f"{steps} supervised steps, last loss {loss:.4f}")
    if summary.reference is not None:
        table.add_row("reference", f"weights {summary.reference.weights_digest[:16]}, scored once")
    table.add_row("steps", f"{summary.state.step} of {facts.steps}, {summary.tokens_per_s:,.0f} tokens/s in steps")
    losses = [step.nll for step in summary.supervised] or [step.loss for step in summary.preference]
    if losses:
        table.add_row("loss", f"{losses[0]:.4f} {curve(losses)} {losses[-1]:.4f}")
    margins = [step.margin for step in summary.preference]
    if margins:
        table.add_row("margin", f"{margins[0]:+.3f} {curve(margins)} {margins[-1]:+.3f}")
    if summary.unusual:
        table.add_row("gradient", unusual_steps(summary.unusual))
    if summary.model is not None:
        table.add_row("model", f"{summary.model.path}, weights {summary.model.weights_digest[:16]}")
    return table


def _evaluations(summary: TuningSummary) -> RenderableType:
    table = Table(title="held out", title_justify="left", title_style="bold", box=None, header_style="dim")
    titles = ("step", "loss", "tokens", "probability of an answer")
    if summary.preference_evaluations:
        titles = (
            "step",
            "loss",
            "accuracy",
            "chosen likelier",
            "reward chosen",
            "rejected",
            "p(chosen)",
            "p(rejected)",
        )
    for title in titles:
        table.add_column(title, justify="right")
    for point in summary.supervised_evaluations:
        table.add_row(str(point.step), f"{point.loss:.4f}", f"{point.tokens:,}", f"{point.probability:.1%}")
    for pair in summary.preference_evaluations:
        shares = (f"{pair.accuracy:.1%}", f"{pair.preferred:.1%}")
        rewards = (f"{pair.chosen_reward:+.3f}", f"{pair.rejected_reward:+.3f}")
        table.add_row(
            str(pair.step),
            f"{pair.loss:.4f}",
            *shares,
            *rewards,
            f"{pair.chosen_probability:.1%}",
            f"{pair.rejected_probability:.1%}",
        )
    table.caption = "\n".join(found.sentence(name, digits=4, unit="sample") for name, found in summary.differences)
    table.caption_justify = "left"
    return table


def _books(summary: TuningSummary) -> RenderableType:
    table = _facts("books, balanced" if summary.books.passed else "books, NOT BALANCED")
    table.title_style = "bold" if summary.books.passed else "bold red"
    whole = sum(count.trained == count.of for count in summary.epochs)
    table.add_row("epochs", f"{whole} in which each of {summary.prepared.samples:,} samples was trained once")
    for count in summary.epochs:
        if count.trained < count.of:
            table.add_row("", f"epoch {count.epoch}: {count.trained:,} of {count.of:,} in {count.steps} steps")
    for fault in summary.books.examples:
        table.add_row("fault", Text(fault, style="red"))
    return table


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
