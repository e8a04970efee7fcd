"""One picture of a run, drawn from its summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.core.errors import ConfigError
from fathom.core.picture import BLUE, GREEN, GREY, ORANGE, picture
from fathom.evidence.report.picture_turns import draw_turns
from fathom.evidence.report.run_summary import RunSummary, StepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTH_STEPS = 10
_FLOAT32_RESOLUTION = 1e-7


def draw(summary: RunSummary, title: str, file: Path) -> None:
    """Write reward, ages, mismatch and the same-version gap over steps to an image `file` (.png, .svg, .pdf).

    Agents' runs come with trajectories in flight, the prefix cache, and turns and tokens per trajectory below.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the run has no steps yet, or the file cannot be written.
    """
    if not summary.steps:
        raise ConfigError(f"{title} has no steps to draw yet")
    turns = summary.turns
    with picture(file, option="--picture", inches=(10.0, 6.0 if turns is None else 11.0)) as figure:
        panels: list[list[Axes]] = figure.subplots(2 if turns is None else 4, 2).tolist()
        (reward, ages), (mismatch, gap) = panels[:2]
        _reward(reward, summary)
        _ages(ages, summary.steps)
        _mismatch(mismatch, summary.steps)
        _gap(gap, summary)
        if turns is not None:
            draw_turns(panels[2:], summary.in_flight, turns)
        for axes in (reward, ages, mismatch, gap):
            axes.sharex(gap)
            axes.locator_params(axis="x", integer=True)
        for axes in (mismatch, gap):
            axes.set_xlabel("optimizer step")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _reward(axes: Axes, summary: RunSummary) -> None:
    axes.set_title("reward")
    points = [(step.number, step.reward_mean) for step in summary.steps if step.reward_mean is not None]
    numbers, rewards = [number for number, _ in points], [reward for _, reward in points]
    axes.plot(numbers, rewards, color=BLUE, alpha=0.3, linewidth=0.8, label="mean of the batch")
    axes.plot(numbers, _smooth(rewards), color=BLUE, linewidth=1.6, label=f"over {_SMOOTH_STEPS} steps")
    if summary.evaluations:
        rates = [point.pass_rate for point in summary.evaluations]
        low = [point.pass_rate - point.low for point in summary.evaluations]
        high = [point.high - point.pass_rate for point in summary.evaluations]
        versions = [point.version for point in summary.evaluations]
        label = f"held out, pass@{summary.evaluations[0].pass_at} with 95 % interval"
        axes.errorbar(versions, rates, yerr=(low, high), fmt="o", color=ORANGE, markersize=4, capsize=3, label=label)
    axes.legend(loc="best")


def _ages(axes: Axes, steps: Sequence[StepPoint]) -> None:
    axes.set_title("age of trained tokens (versions)")
    numbers = [step.number for step in steps]  # a step without tokens leaves a gap in the line
    oldest_kv = [math.nan if step.kv_age_max is None else step.kv_age_max for step in steps]
    oldest = [math.nan if step.age_max is None else step.age_max for step in steps]
    means = [math.nan if step.age_mean is None else step.age_mean for step in steps]
    axes.plot(numbers, oldest_kv, color=ORANGE, linewidth=1.0, label="oldest context (KV)")
    axes.plot(numbers, oldest, color=GREY, linewidth=1.0, linestyle="--", label="oldest token")
    axes.plot(numbers, means, color=BLUE, linewidth=1.4, label="mean")
    axes.set_ylim(bottom=-0.05)
    axes.legend(loc="best")


def _mismatch(axes: Axes, steps: Sequence[StepPoint]) -> None:
    axes.set_title("mismatch: trainer against behaviour, |log r|")
    known = [(step.number, step.mismatch) for step in steps if step.mismatch is not None]
    numbers = [number for number, _ in known]
    axes.plot(numbers, [part.abs_log_ratio_max for _, part in known], color=GREY, linewidth=0.8, label="maximum")
    axes.plot(numbers, [part.abs_log_ratio_mean for _, part in known], color=BLUE, linewidth=1.4, label="mean")
    _log_scale(axes)
    axes.legend(loc="best")


def _gap(axes: Axes, summary: RunSummary) -> None:
    axes.set_title("same-version gap: engine against trainer, |log r|")
    numbers = [point.version for point in summary.gaps]
    means = [point.mismatch.abs_log_ratio_mean for point in summary.gaps]
    largest = [point.mismatch.abs_log_ratio_max for point in summary.gaps]
    axes.plot(numbers, largest, color=GREY, linewidth=0.8, label="maximum")
    axes.plot(numbers, means, color=GREEN, linewidth=1.4, label="mean")
    _log_scale(axes)
    if any(largest):
        axes.legend(loc="best")
        return
    words = f"exactly 0 at all {len(means)} publications" if means else "not measured"
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=GREEN if means else GREY)


def _log_scale(axes: Axes) -> None:
    """Logarithmic down to what float32 resolves, and linear to 0 below: equal bits are a gap of exactly 0."""
    axes.set_yscale("symlog", linthresh=_FLOAT32_RESOLUTION)
    axes.set_ylim(bottom=0)


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, at most `_SMOOTH_STEPS` together."""
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
