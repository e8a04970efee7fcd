"""A run's summary as tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fathom.core.records.step import Mismatch, RouteMetrics
from fathom.evidence.report.run_summary import RunSummary
from fathom.evidence.report.teaching import TeachingSummary
from fathom.evidence.report.turns import Spread, TurnsSummary
from fathom.evidence.runs import RunListing
from fathom.evidence.worst import NormJudged

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60
_UNUSUAL_SHOWN = 5


def sections(run: RunListing, summary: RunSummary) -> Iterator[RenderableType]:
    """The parts of the page, those with nothing to say left out."""
    yield _header(run, summary)
    if summary.evaluations:
        yield _evaluations(summary)
    if summary.teaching is not None:
        yield _teaching(summary.teaching)
    yield _books(summary)
    if summary.mismatch is not None:
        yield _mismatch(summary)
    if summary.routes is not None:
        yield _routes(summary, summary.routes)
    if summary.fortunes:
        yield _fortunes(summary)
    if summary.turns is not None:
        yield _turns(summary, summary.turns)
    if summary.ungraded:
        yield _ungraded(summary)
    if summary.publications is not None or summary.throughput is not None:
        yield _speed(summary)
    if len(summary.engines) > 1 or any(life.fenced for life in summary.engines):
        yield _engines(summary)
    if summary.faults:
        yield _faults(summary)


def curve(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Values as a line of bars, each bar the mean of its share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(part * len(values) / count) for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[min(int((mean - low) / span * len(_BARS)), len(_BARS) - 1)] for mean in means)


def unusual_steps(norms: Sequence[NormJudged]) -> str:
    """Steps with a gradient out of the ordinary, at least one, as a sentence."""
    named = ", ".join(f"{norm.step} ({norm.grad_norm:.3g})" for norm in norms[-_UNUSUAL_SHOWN:])
    return f"unusual in {len(norms)} steps, the last ones {named}: fathom trace --worst 5"


def _header(run: RunListing, summary: RunSummary) -> RenderableType:
    table = _facts(run.name)
    resumed = f", resumed {summary.incarnations - 1} times" if summary.incarnations > 1 else ""
    table.add_row("state", f"{run.state}{resumed}")
    if summary.started_s:
        table.add_row("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.started_s)))
    if summary.warm_start is not None:
        steps, loss = summary.warm_start
        table.add_row("warm start", f"{steps} supervised steps, last loss {loss:.4f}")
    idle = sum(not point.stepped for point in summary.steps)
    planned = f" of {run.steps}" if run.steps is not None else ""
    table.add_row("steps", f"{summary.state.step}{planned}" + (f", and {idle} without effect" if idle else ""))
    rewards = [point.reward_mean for point in summary.steps if point.reward_mean is not None]
    if rewards:
        table.add_row("reward", f"{rewards[0]:.3f} {curve(rewards)} {rewards[-1]:.3f}")
    explained = [point.explained_variance for point in summary.steps if point.explained_variance is not None]
    if explained:
        table.add_row(
            "explained", f"{explained[0]:.2f} {curve(explained)} {explained[-1]:.2f} (of returns, by the critic)"
        )
    if summary.unusual:
        table.add_row("gradient", unusual_steps(summary.unusual))
    ages = [point.age_mean for point in summary.steps if point.age_mean is not None]
    if ages:
        largest = max(point.age_max or 0 for point in summary.steps)
        table.add_row("age", f"mean {sum(ages) / len(ages):.2f}, largest {largest}")
    return table


def _evaluations(summary: RunSummary) -> RenderableType:
    first = summary.evaluations[0]
    table = _table(f"held-out evaluation (pass@{first.pass_at}, 95 % interval)")
    for title in ("version", "pass rate", "interval", "mean reward", "tokens", "tasks", "ungraded"):
        table.add_column(title, justify="right")
    for point in summary.evaluations:
        interval = f"{point.low:.3f} to {point.high:.3f}"
        tokens = "" if point.tokens_mean is None else f"{point.tokens_mean:.1f}"
        rates = (f"{point.pass_rate:.3f}", interval, f"{point.reward_mean:.3f}")
        cells = (*rates, tokens, f"{point.tasks}", f"{point.ungraded}")
        table.add_row(f"v{point.version}", *cells)
    sentences = [summary.before_after.sentence("mean reward")] if summary.before_after is not None else []
    if summary.lengths is not None:
        sentences.append(summary.lengths.sentence("tokens of an answer", digits=2))
    return Group(table, *map(Text, sentences))


def _teaching(teaching: TeachingSummary) -> RenderableType:
    table = _facts("learned from teachers")
    for name, digest in teaching.teachers:
        table.add_row("teacher", f"{name}, weights {digest[:12]}")
    for title, values in (("reverse KL", teaching.reverse_kl), ("over ids", teaching.compared)):
        if values:
            table.add_row(title, f"{values[0]:.4f} {curve(values)} {values[-1]:.4f} nats a token")
    table.add_row(
        "scored", f"{teaching.scored_share:.2%} of the tokens with loss, in {teaching.seconds:.1f} s of asking"
    )
    return table


def _books(summary: RunSummary) -> RenderableType:
    books = summary.books
    table = _facts("books, balanced" if books.balanced else "books, NOT BALANCED")
    table.title_style = "bold" if books.balanced else "bold red"
    occurrences = [f"{count:,} {_words(state)}" for state, count in books.occurrences.items() if count]
    table.add_row("occurrences", ", ".join(occurrences))
    attempts = [
        f"{part.count:,} {_words(part.state)}" + (f" ({_words(part.fate)})" if part.fate else "")
        for part in books.attempts
    ]
    table.add_row("trajectories", ", ".join(attempts))
    parts = [f"{books.in_gradient:,} in the gradient"]
    parts += [f"{count:,} masked ({_words(reason)})" for reason, count in books.masked.items()]
    parts += [f"{books.waiting:,} waiting"] if books.waiting else []
    table.add_row("tokens", f"{books.sampled_tokens:,} sampled = {' + '.join(parts)}")
    for fault in books.faults[:5]:
        table.add_row("fault", Text(fault, style="red"))
    return table


def _mismatch(summary: RunSummary) -> RenderableType:
    table = _table("mismatch: trainer before the step against behaviour")
    titles = ("age", "KV age", "tokens", "mean |log r|", "max |log r|", "k3", "max r", "ESS", "clipped", "popped")
    for title in titles:
        table.add_column(title, justify="right")
    for part in summary.ages:
        table.add_row(str(part.age), str(part.kv_age), *_mismatch_cells(part.mismatch))
    if summary.mismatch is not None:
        table.add_section()
        table.add_row("all", "", *_mismatch_cells(summary.mismatch), style="bold")
    if summary.gaps:
        means = [gap.mismatch.abs_log_ratio_mean for gap in summary.gaps]
        largest = max(gap.mismatch.abs_log_ratio_max for gap in summary.gaps)
        table.caption = (
            f"same-version gap, engine against trainer at {len(means)} publications: mean |log r| "
            f"{sum(means) / len(means):.1e}, largest token {largest:.1e}"
        )
        table.caption_justify = "left"
    return table


def _mismatch_cells(part: Mismatch) -> tuple[str, ...]:
    return (
        f"{part.tokens:,}",
        f"{part.abs_log_ratio_mean:.1e}",
        f"{part.abs_log_ratio_max:.1e}",
        f"{part.k3:.1e}",
        f"{part.ratio_max:.3f}",
        f"{part.ess:.4f}",
        f"{part.clipped_share:.2%}",
        f"{part.popped_share:.2%}",
    )


def _routes(summary: RunSummary, routes: RouteMetrics) -> RenderableType:
    layers = routes.layer_agreement
    worst = min(range(len(layers)), key=layers.__getitem__)
    table = _facts("expert routes: the trainer's own choice beside the recorded one")
    table.add_row("tokens", f"{routes.tokens:,} compared, {1 - routes.agreement:.2%} differ in some layer")
    table.add_row(
        "layers",
        f"{1 - sum(layers) / len(layers):.2%} of tokens differ in a layer on average, {1 - layers[worst]:.2%} in the "
        f"worst ({worst + 1} of {len(layers)}); {routes.overlap:.2%} of the recorded experts are chosen",
    )
    table.add_row("replayed", f"{routes.forced_share:.2%}")
    table.add_row("mixed", f"{routes.mixed_share:.2%} of trained tokens come after routes of several versions")
    if routes.margin_mean is not None and routes.margin_p01 is not None:
        table.add_row("margin", f"mean {routes.margin_mean:.1e}, 1st percentile {routes.margin_p01:.1e}")
    busy = sum(point.step_s for point in summary.steps)
    share = f" ({routes.seconds / busy:.1%} of the steps)" if busy else ""
    table.add_row("cost", f"{routes.size_bytes / 1e6:.2f} MB of routes, {routes.seconds:.2f} s in the trainer{share}")
    return table


def _fortunes(summary: RunSummary) -> RenderableType:
    table = _table("lengths and latencies, side by side")
    for title in ("state", "trajectories", "tokens mean", "p50", "p95", "seconds mean", "p50", "p95"):
        table.add_column(title, justify="left" if title == "state" else "right")
    for part in summary.fortunes:
        tokens = (f"{part.tokens_mean:.1f}", f"{part.tokens_p50:.0f}", f"{part.tokens_p95:.0f}")
        seconds = (f"{part.seconds_mean:.2f}", f"{part.seconds_p50:.2f}", f"{part.seconds_p95:.2f}")
        table.add_row(_words(part.state), f"{part.count:,}", *tokens, *seconds)
    return table


def _turns(summary: RunSummary, turns: TurnsSummary) -> RenderableType:
    table = _facts(f"turns of {turns.trajectories:,} trajectories")
    table.add_row("turns", _spread(turns.turns))
    table.add_row("tokens sent", _spread(turns.prompt_tokens))
    table.add_row("tokens sampled", _spread(turns.sampled_tokens))
    rate = turns.hit_rate
    table.add_row(
        "prefix cache",
        f"{rate.measured:.1%} of the tokens sent; at best {rate.bound:.1%}; "
        f"{rate.own_turns:.1%} were known from a trajectory's own turns",
    )
    if len(turns.steps) > 1:
        rates = [point.hit_rate.measured for point in turns.steps]
        table.add_row("over the steps", f"{rates[0]:.1%} {curve(rates)} {rates[-1]:.1%}")
    if summary.in_flight:
        counts = [count for _, count in summary.in_flight]
        table.add_row("in flight", f"mean {sum(counts) / len(counts):.1f}, most {max(counts)} {curve(counts)}")
    return table


def _spread(spread: Spread) -> str:
    return f"mean {spread.mean:,.1f}, p50 {spread.p50:,.0f}, p95 {spread.p95:,.0f}, most {spread.largest:,}"


def _ungraded(summary: RunSummary) -> RenderableType:
    table = _facts("ungraded")
    for cause, count in summary.ungraded:
        table.add_row(cause, f"{count:,}")
    return table


def _speed(summary: RunSummary) -> RenderableType:
    table = _facts("speed")
    speed, sent = summary.throughput, summary.publications
    if speed is not None:
        table.add_row("wall clock", f"{speed.seconds:.1f} s from the first publication to the last step")
        table.add_row(
            "throughput", f"{speed.tokens_per_s:,.0f} trained and {speed.sampled_tokens_per_s:,.0f} sampled tokens/s"
        )
        table.add_row("trainer", f"in steps {speed.trainer_busy:.0%}, waiting for batches {speed.trainer_waiting:.0%}")
        table.add_row("ledger", f"{speed.ledger_share:.2%} of the wall clock")
    if summary.drafted_tokens:
        accepted, drafted = summary.accepted_tokens, summary.drafted_tokens
        table.add_row("speculation", f"{accepted:,} of {drafted:,} drafted tokens accepted ({accepted / drafted:.1%})")
    if sent is not None:
        fenced = f", {sent.fenced} engines fenced" if sent.fenced else ""
        table.add_row("publications", f"{sent.count} of {sent.size_bytes / 1e6:.1f} MB{fenced}")
        table.add_row(
            "",
            f"write {sent.write_s * 1e3:.0f} ms; stage to commit {sent.deliver_s * 1e3:.0f} ms (longest "
            f"{sent.deliver_max_s * 1e3:.0f}), generation paused {sent.pause_s * 1e3:.0f} ms (longest "
            f"{sent.pause_max_s * 1e3:.0f})",
        )
    return table


def _engines(summary: RunSummary) -> RenderableType:
    table = _table("engines")
    for title in ("engine", "state", "version", "fenced", "restored", "discarded", "out of service", "the last reason"):
        table.add_column(title, justify="left" if title in ("engine", "state", "the last reason") else "right")
    for life in summary.engines:
        counts = (f"{life.fenced}", f"{life.restored}", f"{life.discarded}", f"{life.out_s:.1f} s")
        version = "-" if life.version is None else f"v{life.version}"
        reason = Text(life.last_reason.splitlines()[0][:120] if life.last_reason else "")
        table.add_row(life.engine, life.state, version, *counts, reason)
    return table


def _faults(summary: RunSummary) -> RenderableType:
    table = _table("infrastructure failures")
    for title in ("component", "kind", "count", "the newest"):
        table.add_column(title)
    for fault in summary.faults:
        table.add_row(fault.component, fault.kind, str(fault.count), Text(fault.last_detail.splitlines()[0][:200]))
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
