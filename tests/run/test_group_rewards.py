"""Whole runs in which members of a group are compared: once for each attempt, recorded as a component."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from small_runs import SCRIPTED, require_sound, small_config

from fathom import Run
from fathom.core.records.states import Fate
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.ledger.events import AttemptMoved, GroupStarted
from fathom.ledger.reader import LedgerReader


@pytest.mark.parametrize("fails_first", [False, True])
def test_groups_are_compared_once_for_each_attempt(tmp_path: Path, fails_first: bool) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    options = f'{{notes="{notes}", fails_first={str(fails_first).lower()}}}'
    config = small_config(
        tmp_path, SCRIPTED, 'task.kind="comparisons:Comparisons"', f"task.options={options}", "trainer.steps=3"
    )
    run = Run(config).start()
    require_sound(run.folder)
    with LedgerReader(run.folder / "ledger") as reader:
        headers = [reader.trajectory(each.id).trajectory.header for each in reader.trajectories()]
        moves = Counter(entry.event.fate for entry in reader.events(AttemptMoved))
        started = Counter(entry.event.task for entry in reader.events(GroupStarted))
    by_group: dict[str, list[Graded | Ungraded]] = {}
    for header in headers:
        by_group.setdefault(header.group, []).append(header.reward)
    complete = [rewards for rewards in by_group.values() if len(rewards) == 4]
    for rewards in complete:
        if isinstance(rewards[0], Ungraded):
            assert {
                (reward.cause, reward.detail.split(" (")[0]) for reward in rewards if isinstance(reward, Ungraded)
            } == {("group_error", "ValueError: as asked")}
            continue
        graded = [reward for reward in rewards if isinstance(reward, Graded)]
        assert len(graded) == 4
        assert {reward.grader for reward in graded} == {"said/1 + above/1"}
        assert sum(reward.components["above"] for reward in graded) == pytest.approx(0)
        assert any(reward.total for reward in graded) or all(not reward.components["above"] for reward in graded)
    compared = Counter(note.name.partition("-")[0] for note in notes.iterdir())
    assert {note.read_text() for note in notes.iterdir()} == {"0 1 2 3"}
    assert all(compared[task] <= started[task] for task in started)
    assert compared.total() >= len(complete) >= 6
    lost = sum(isinstance(rewards[0], Ungraded) for rewards in complete)
    assert bool(lost) == fails_first
    assert moves[Fate.UNGRADED] == 4 * lost
