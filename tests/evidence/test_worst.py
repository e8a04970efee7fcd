"""Gradient norms out of the ordinary, and the trajectories behind them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fathom.core.errors import LedgerError
from fathom.core.records.step import MaskReason
from fathom.evidence.report.summary import summarise
from fathom.evidence.worst import ANOMALOUS_RATIO, judge_norms, worst_steps, worst_tuning_steps
from fathom.ledger.events import StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import SupervisedStepped
from synthetic.history import History, config
from synthetic.records import outcome, step


def taken(number: int, norm: float, *, non_finite: int = 0) -> StepTaken:
    made = step(number, ())
    metrics = msgspec.structs.replace(made.metrics, grad_norm=norm, tokens=10, non_finite_tokens=non_finite)
    return msgspec.structs.replace(made, metrics=metrics)


def steady(count: int) -> list[StepTaken]:
    return [taken(number, 1.0 + 0.1 * (number % 3)) for number in range(1, count + 1)]


def test_a_spike_is_told_from_the_usual_and_from_a_slow_rise() -> None:
    judged = judge_norms([*steady(20), taken(21, 9.0), *[taken(22 + i, 1.1) for i in range(5)]])
    assert [norm.step for norm in judged if norm.anomalous] == [21]
    spike = judged[20]
    assert spike.median == pytest.approx(1.1)
    assert spike.ratio == pytest.approx(9 / 1.1)
    rising = judge_norms([taken(number, 1.03**number) for number in range(1, 200)])
    assert not [norm for norm in rising if norm.anomalous]
    noisy = judge_norms([taken(number, 10.0 ** (number % 3)) for number in range(1, 60)])
    assert max(norm.ratio or 0 for norm in noisy) > ANOMALOUS_RATIO
    assert not [norm for norm in noisy if norm.anomalous]


def test_the_first_steps_are_compared_with_nothing() -> None:
    judged = judge_norms([taken(1, 100.0), *steady(12)[1:]])
    assert judged[0].ratio is None
    assert [norm.median is None for norm in judged] == [True] * 8 + [False] * 4


def test_a_norm_that_is_not_finite_is_anomalous_and_spoils_no_median() -> None:
    judged = judge_norms([*steady(10), taken(11, math.inf), taken(12, math.nan), taken(13, 1.0)])
    assert [norm.step for norm in judged if norm.anomalous] == [11, 12]
    assert judged[-1].median == pytest.approx(1.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve steps; step 9 has a spike with one heavy trajectory, step 11 a token that is not finite."""
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    for number in range(1, 13):
        records = history.group(number - 1)
        rows = [outcome(record) for record in records]
        if number == 9:
            rows[1] = msgspec.structs.replace(
                rows[1], weights=np.full(len(rows[1].positions), 2.0, np.float32), advantage=-4.0
            )
        if number == 11:
            broken = outcome(records[0], masked={1: MaskReason.NON_FINITE})
            logprobs = broken.trainer_logprobs.copy()
            logprobs[1] = np.nan
            rows[0] = msgspec.structs.replace(broken, trainer_logprobs=logprobs)
        event = taken(number, 20.0 if number == 9 else 1.0, non_finite=int(number == 11))
        history.writer.append_step(event, tuple(rows))
        history.settle(records, number)
    history.writer.commit()
    history.writer.close()
    return tmp_path


def part_tokens(reader: LedgerReader, number: int, place: int) -> int:
    """Tokens with loss of a row."""
    return reader.rows_at(number)[place].tokens


def test_the_trajectories_behind_a_spike_and_behind_refused_tokens_are_named(folder: Path) -> None:
    with LedgerReader(folder) as reader:
        refused, spike, *others = worst_steps(reader, 4, parts=1)
        assert (refused.norm.step, refused.norm.non_finite_tokens) == (11, 1)
        (part,) = refused.parts
        assert part.non_finite == 1
        assert part.trajectory.endswith("m0")
        assert part.tokens == part_tokens(reader, 11, 0) - 1
        assert part.largest_log_ratio == pytest.approx(0.01, abs=1e-5)
        assert (spike.norm.step, spike.anomalous) == (9, True)
        (part,) = spike.parts
        assert part.trajectory.endswith("m1")
        assert part.advantage == -4.0
        assert part.largest_weight == 2.0
        heavy, light = 8.0 * part_tokens(reader, 9, 1), 0.5 * math.exp(-0.01) * part_tokens(reader, 9, 0)
        assert part.share == pytest.approx(heavy / (heavy + light), rel=1e-3)
        assert not [step for step in others if step.anomalous]


def test_the_summary_says_how_much_the_critic_knew(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    for number, explained in enumerate((None, 0.25), start=1):
        event = taken(number, 1.0)
        metrics = msgspec.structs.replace(event.metrics, explained_variance=explained)
        history.writer.append_step(msgspec.structs.replace(event, metrics=metrics), ())
    history.writer.commit()
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        assert [point.explained_variance for point in summarise(reader).steps] == [None, 0.25]


def test_the_summary_has_the_unusual_steps(folder: Path) -> None:
    with LedgerReader(folder) as reader:
        assert [norm.step for norm in summarise(reader).unusual] == [9]


def test_token_advantages_count_where_they_are_recorded(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    records = history.group(0)
    rows = [outcome(record) for record in records]
    tokens = [len(row.positions) for row in rows]
    advantages = np.zeros(tokens[0], np.float32)
    advantages[:2] = 3.0, -3.0
    rows[0] = msgspec.structs.replace(rows[0], advantages=advantages, advantage=0.0)
    history.writer.append_step(taken(1, 1.0), tuple(rows))
    history.writer.commit()
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        (worst,) = worst_steps(reader, 1)
        first, second = worst.parts
        assert first.share == pytest.approx(6 / (6 + 0.5 * tokens[1]))
        assert (first.advantage, second.advantage) == (0.0, 0.5)


def test_a_step_that_no_advantage_moved_has_no_shares(tmp_path: Path) -> None:
    """Ids compared with a teacher, the task's reward not trained on."""
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    rows = [msgspec.structs.replace(outcome(record), advantage=0.0) for record in history.group(0)]
    history.writer.append_step(taken(1, 1.0), tuple(rows))
    history.writer.commit()
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        (worst,) = worst_steps(reader, 1)
        assert [part.share for part in worst.parts] == [None, None]


def tuned(number: int, norm: float, *, non_finite: int = 0) -> SupervisedStepped:
    return SupervisedStepped(
        number=number,
        epoch=number // 8,
        samples=(number, number + 100),
        loss=1.0,
        tokens=10,
        non_finite=non_finite,
        forward_tokens=20,
        grad_norm=norm,
        lr=1e-3,
        step_s=0.1,
        weights_digest="0" * 64,
        nll=1.0,
    )


def test_a_run_that_tunes_names_the_samples_behind_a_spike(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    with LedgerReader(tmp_path) as reader, pytest.raises(LedgerError, match="no step has been taken yet"):
        worst_tuning_steps(reader, 1)
    for number in range(1, 15):
        history.writer.append(tuned(number, 20.0 if number == 12 else 1.0, non_finite=int(number == 5)))
    history.writer.commit()
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        refused, spike, usual = worst_tuning_steps(reader, 3)
    assert (refused.norm.step, refused.norm.non_finite_tokens, refused.anomalous) == (5, 1, False)
    assert (spike.norm.step, spike.anomalous, spike.epoch, spike.samples) == (12, True, 1, (12, 112))
    assert spike.norm.ratio == pytest.approx(20)
    assert not usual.anomalous


def test_a_step_without_effect_stands_beside_the_one_that_took_its_number(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.open(config())
    history.publish(0)
    for number in (1, 2):
        history.train(number, history.group(number - 1))
        history.publish(number)
    spoilt = history.group(2)
    rows = tuple(outcome(record) for record in spoilt)
    refused = step(3, rows, stepped=False)
    metrics = msgspec.structs.replace(refused.metrics, grad_norm=math.inf, tokens=10)
    history.writer.append_step(msgspec.structs.replace(refused, metrics=metrics), rows)
    history.settle(spoilt, 3)
    right = history.group(2)
    history.train(3, right)
    history.writer.close()
    with LedgerReader(tmp_path) as reader:
        found = worst_steps(reader, 10)
    assert [each.norm.step for each in found].count(3) == 2
    assert found[0].norm.grad_norm == math.inf
    assert {part.trajectory for part in found[0].parts} == {record.header.id for record in spoilt}
    [other] = [each for each in found[1:] if each.norm.step == 3]
    assert {part.trajectory for part in other.parts} == {record.header.id for record in right}
