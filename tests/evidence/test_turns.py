"""Turns of a run of agents: per trajectory, over the steps, and over time."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fathom.apps.cli.main import app
from fathom.core.ids import TrajectoryId
from fathom.evidence.report.summary import summarise
from fathom.evidence.report.turns import asks_often, summarise_turns
from fathom.ledger.entries import Recorded
from fathom.ledger.events import StepTaken, TrajectoryEnded
from fathom.ledger.reader import LedgerReader
from synthetic.history import History, config
from synthetic.records import step

CALLS = [(1000, 0, 0), (1350, 1200, 1200), (1800, 1650, 1650), (2000, 1900, 1900)]
"""Prompt, cached and known tokens of the worked example's calls."""


def ended(turns: int, prompt: int, cached: int, known: int, name: str = "1/e0.i0/a0/m0") -> TrajectoryEnded:
    return TrajectoryEnded(
        trajectory=TrajectoryId(name),
        arrival_age=0,
        sampled_tokens=10 * turns,
        prompt_tokens=prompt,
        cached_tokens=cached,
        drafted_tokens=0,
        accepted_tokens=0,
        turns=turns,
        known_tokens=known,
    )


def ends(*events: TrajectoryEnded) -> list[Recorded[TrajectoryEnded]]:
    return [Recorded(seq=2 * place, at_s=float(place), event=event) for place, event in enumerate(events)]


def steps(*seqs: int) -> list[Recorded[StepTaken]]:
    return [Recorded(seq=seq, at_s=0.0, event=step(number, ())) for number, seq in enumerate(seqs, 1)]


def test_rates_are_weighted_by_tokens() -> None:
    """0.772358 is that of the worked example, 0.688889 the mean of its calls' rates."""
    events = [ended(2, *call, name=str(place)) for place, call in enumerate(CALLS)]
    known = {event.trajectory: 1000 for event in events}
    rate = summarise_turns(ends(*events), [], known).hit_rate
    assert rate.measured == rate.own_turns == pytest.approx(0.772358, abs=1e-6)
    assert rate.bound == pytest.approx(4000 / 6150)


def test_a_run_of_single_turns_does_not_ask_often() -> None:
    assert not asks_often(ends(ended(1, 5, 0, 0), ended(0, 0, 0, 0)))
    assert not asks_often([])
    assert asks_often(ends(ended(1, 5, 0, 0), ended(2, 9, 0, 0)))


def test_each_trajectory_belongs_to_the_step_that_followed_its_end() -> None:
    made = [ended(turns, 10, turns, 5, name=str(turns)) for turns in (1, 2, 3, 4)]  # at 0, 2, 4, 6
    known = {event.trajectory: 2 * event.turns for event in made}
    summary = summarise_turns(ends(*made), steps(1, 3, 3, 5), known)
    assert [(point.number, point.trajectories, point.turns_mean) for point in summary.steps] == [
        (1, 1, 1.0),
        (2, 1, 2.0),
        (4, 1, 3.0),
    ]
    assert [point.hit_rate.measured for point in summary.steps] == pytest.approx([0.1, 0.2, 0.3])
    assert [point.hit_rate.bound for point in summary.steps] == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize("counts", [[2], [1, 2, 2, 3], list(range(1, 100)), [1, 1000]])
def test_a_spread_counts_every_trajectory_once(counts: list[int]) -> None:
    made = ends(*(ended(turns, 10, 0, 0) for turns in counts))
    spread = summarise_turns(made, [], {end.event.trajectory: 0 for end in made}).turns
    assert sum(spread.counts) == len(counts)
    assert len(spread.edges) == len(spread.counts) + 1 <= 26
    assert spread.edges[0] == min(counts)
    assert spread.largest == max(counts) < spread.edges[-1]
    assert spread.mean == pytest.approx(sum(counts) / len(counts))


def agents_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config().model_dump_json(exclude_unset=True))
    history = History(folder / "ledger")
    history.turns = 3
    history.open(config())
    history.publish(0)
    for number in (1, 2):
        history.loop()
        history.train(number, [*history.group(number - 1), *history.group(number - 1)])
        history.publish(number)
    history.end(2)
    return folder


def test_a_run_shows_and_draws_its_turns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    run, picture = agents_run(tmp_path / "run"), tmp_path / "run.png"
    with LedgerReader(run / "ledger") as reader:
        summary = summarise(reader)
    assert [count for _, count in summary.in_flight] == [4, 4]
    assert summary.turns is not None
    assert [point.trajectories for point in summary.turns.steps] == [4, 4]
    done = CliRunner().invoke(app, ["show", str(run), "--picture", str(picture)], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    for words in ("turns of 8 trajectories", "mean 3.0", "prefix cache", "at best", "in flight"):
        assert words in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
