"""The summary's numbers are those of the history."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import LedgerError
from fathom.core.records.states import AttemptState, Fate, OccurrenceState
from fathom.core.records.step import MaskReason, Mismatch
from fathom.evidence.report.paired import paired_difference
from fathom.evidence.report.pooling import pool
from fathom.evidence.report.run_summary import RunSummary
from fathom.evidence.report.summary import summarise
from fathom.evidence.run_state import RunPhase
from fathom.ledger.reader import LedgerReader
from synthetic.history import History, config, write_run
from synthetic.records import mismatch


def summary_of(ledger: Path) -> RunSummary:
    with LedgerReader(ledger) as reader:
        return summarise(reader)


def test_a_whole_run(tmp_path: Path) -> None:
    summary = summary_of(write_run(tmp_path / "run") / "ledger")
    assert (summary.state.phase, summary.state.reason, summary.state.step) == (RunPhase.ENDED, "steps", 4)
    assert [point.number for point in summary.steps] == [1, 2, 3, 4]
    assert [point.reward_mean for point in summary.steps] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert [point.age_max for point in summary.steps] == [0, 1, 1, 1]
    assert summary.steps[0].age_mean == 0
    assert summary.before_after is not None
    assert summary.before_after.tasks == 4
    assert summary.before_after.difference == pytest.approx(0.5)
    assert summary.books.balanced
    assert summary.books.occurrences == {
        OccurrenceState.TRAINED: 8,
        OccurrenceState.GIVEN_UP: 1,
        OccurrenceState.OPEN: 0,
    }
    assert [(count.state, count.fate, count.count) for count in summary.books.attempts] == [
        (AttemptState.TRAINED, None, 16),
        (AttemptState.DROPPED, Fate.AGE, 2),
    ]
    assert summary.books.masked == {MaskReason.AGE: 12}
    assert summary.books.sampled_tokens == summary.books.in_gradient + 12
    assert sum(age.mismatch.tokens for age in summary.ages) == summary.books.in_gradient
    assert {(age.age, age.kv_age) for age in summary.ages} == {(0, 0), (1, 1)}
    assert [gap.version for gap in summary.gaps] == [0, 1, 2, 3, 4]
    assert summary.publications is not None
    assert (summary.publications.count, summary.publications.size_bytes) == (5, 4_000_000)
    assert summary.publications.deliver_s == pytest.approx(0.035)
    assert [(fault.component, fault.count) for fault in summary.faults] == [("engine-0", 1)]
    assert (summary.drafted_tokens, summary.accepted_tokens) == (18 * 8, 18 * 6)
    trained, dropped = summary.fortunes
    assert (trained.state, trained.count) == (AttemptState.TRAINED, 16)
    assert (dropped.state, dropped.seconds_p50) == (AttemptState.DROPPED, 20.0)
    assert summary.throughput is not None
    assert summary.throughput.seconds > 0
    assert 0 < summary.throughput.ledger_share < 1


def test_it_is_json_without_nan(tmp_path: Path) -> None:
    text = msgspec.json.encode(summary_of(write_run(tmp_path / "run") / "ledger"))
    tree = msgspec.json.decode(text)
    assert tree["books"]["occurrences"]["trained"] == 8
    assert tree["before_after"]["difference"] == pytest.approx(0.5)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    history.writer.close()
    summary = summary_of(tmp_path)
    assert summary.state.phase is RunPhase.OPEN
    assert (summary.steps, summary.mismatch, summary.throughput, summary.before_after) == ((), None, None, None)


def test_a_resumed_run_counts_what_survives(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    history.train(1, history.group(0))
    seq = history.checkpoint(1)
    history.train(2, history.group(0))
    history.writer.close()
    resumed = History(tmp_path, resumed=True)
    resumed.open(config(), incarnation=2, parent_seq=seq, step=1)
    resumed.writer.close()
    summary = summary_of(tmp_path)
    assert (summary.incarnations, summary.state.step, summary.state.phase) == (2, 1, RunPhase.OPEN)
    assert [point.number for point in summary.steps] == [1]
    assert summary.books.occurrences[OccurrenceState.TRAINED] == 1


def test_speed_leaves_out_the_time_between_incarnations(tmp_path: Path) -> None:
    def play(history: History, first: int) -> int:
        history.publish(first)
        history.train(first + 1, history.group(first))
        seq = history.checkpoint(first + 1)
        history.writer.close()
        return seq

    history = History(tmp_path)
    history.open(config())
    seq = play(history, 0)
    alone = summary_of(tmp_path).throughput
    resumed = History(tmp_path, resumed=True, start_s=1_800_000_000.0)
    resumed.place = 1
    resumed.open(config(), incarnation=2, parent_seq=seq, step=1)
    play(resumed, 1)
    together = summary_of(tmp_path).throughput
    assert alone is not None
    assert together is not None
    assert together.seconds == pytest.approx(2 * alone.seconds)


def test_pooling_is_that_of_all_tokens() -> None:
    def measure(log_ratios: np.ndarray) -> Mismatch:
        r = np.exp(log_ratios)
        return Mismatch(
            tokens=len(r),
            abs_log_ratio_mean=float(np.abs(log_ratios).mean()),
            abs_log_ratio_max=float(np.abs(log_ratios).max()),
            k1=float(-log_ratios.mean()),
            k2=float((log_ratios**2).mean() / 2),
            k3=float((r - 1 - log_ratios).mean()),
            ratio_mean=float(r.mean()),
            ratio_p01=0.0,
            ratio_p50=0.0,
            ratio_p99=0.0,
            ratio_max=float(r.max()),
            ess=float(r.sum() ** 2 / (len(r) * (r**2).sum())),
            clipped_share=float((r > 1.5).mean()),
            popped_share=float((r < 0.5).mean()),
        )

    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 0.5, 100), rng.normal(0.3, 1.0, 37)
    pooled, whole = pool([measure(first), measure(second)]), measure(np.concatenate([first, second]))
    assert pooled is not None
    for name in Mismatch.__struct_fields__:
        assert getattr(pooled, name) == pytest.approx(getattr(whole, name)), name
    assert pool([]) is None
    assert pool([msgspec.structs.replace(mismatch(5), tokens=0)]) is None


def test_a_paired_difference_has_the_interval_of_the_normal_law() -> None:
    rng = np.random.default_rng(1)
    before = (rng.random(500) < 0.3).astype(float)
    after = np.maximum(before, (rng.random(500) < 0.2).astype(float))
    found = paired_difference(before.tolist(), after.tolist())
    assert found is not None
    differences = after - before
    half = 1.96 * differences.std() / math.sqrt(500)
    assert found.difference == pytest.approx(differences.mean())
    assert found.low == pytest.approx(differences.mean() - half, abs=0.004)
    assert found.high == pytest.approx(differences.mean() + half, abs=0.004)
    assert found.is_change
    assert found.standard_error == pytest.approx(half / 1.96, rel=2e-3)
    assert found.before_error == pytest.approx(before.std() / math.sqrt(500), rel=2e-3)
    said = found.sentence("reward", digits=2)
    assert said.startswith(f"reward: {before.mean():.2f} (")
    assert "it rose: the interval excludes 0" in said


def test_a_change_is_called_one_only_when_the_data_support_it() -> None:
    """14,070 to 6,132 tokens is a change; 84.0 to 85.2 % at a standard error of 1.6 points is not."""
    rng = np.random.default_rng(5)
    long, short = rng.normal(14070, 4000, 500), rng.normal(6132, 3000, 500)
    lengths = paired_difference(long.tolist(), short.tolist())
    assert lengths is not None
    assert lengths.is_change
    assert "it fell" in lengths.sentence("tokens")
    right, still = np.zeros(500), np.zeros(500)
    right[:420] = 1
    still[30:456] = 1
    accuracy = paired_difference(right.tolist(), still.tolist())
    assert accuracy is not None
    assert (accuracy.before, accuracy.after) == (0.84, 0.852)
    assert accuracy.after_error == pytest.approx(0.016, abs=5e-4)
    assert not accuracy.is_change
    assert "no change can be claimed" in accuracy.sentence("pass rate")
    alone = paired_difference([1.0], [0.0])
    assert alone is not None
    assert alone.standard_error is None
    assert "paired by task: -1.000, 95 %" in alone.sentence("reward")
    assert "no change can be claimed, too few tasks differ (1)" in alone.sentence("reward")


@pytest.mark.parametrize("tasks", [6, 400])
@pytest.mark.parametrize("changed", [1, 5, 6])
def test_a_handful_of_tasks_is_no_change_however_narrow_the_interval(tasks: int, changed: int) -> None:
    """Of 5 that all got better one would say so once in 16 times though nothing is better."""
    after = [1.0] * changed + [0.0] * (tasks - changed)
    found = paired_difference([0.0] * tasks, after)
    assert found is not None
    assert found.changed == changed
    assert found.is_change == (changed == 6)
    assert ("it rose" in found.sentence("pass rate")) == (changed == 6)
    named = f"too few samples differ ({changed})" in found.sentence("pass rate", unit="sample")
    assert named == (changed < 6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_no_change_is_called_no_change(rewards: list[float]) -> None:
    found = paired_difference(rewards, rewards)
    assert found is not None
    assert (found.low, found.difference, found.high) == (0, 0, 0)
    assert not found.is_change


def test_pairs_need_the_same_tasks_and_a_reward_on_both_sides() -> None:
    with pytest.raises(LedgerError, match="not paired"):
        paired_difference([1.0], [1.0, 0.0])
    assert paired_difference([math.nan, 1.0], [1.0, math.nan]) is None
