"""Whole runs of agents with the dynamic filter: refilled while something passes, ended by name when nothing can."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from small_runs import require_sound
from talks import TEMPLATE, TalkOptions, hopeless_of

from fathom import Run
from fathom.buffer.group_buffer import FRUITLESS_BATCHES
from fathom.config.load import parse_config
from fathom.core.errors import NoProgressError
from fathom.core.records.states import AttemptState, Fate
from fathom.ledger.events import AttemptMoved, GroupStarted, OccurrenceClosed, RunEnded, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer


def run_of(folder: Path, talk: dict[str, object], group_size: int, groups_per_step: int, steps: int) -> Run:
    """A run in which groups whose rewards are equal are filtered."""
    model = folder / "model"
    model.mkdir()
    save_character_tokenizer(model)
    described = model / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"chat_template": TEMPLATE}))
    make_tiny("arithmetic", 0, model)
    table = {
        "name": "talks",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "task": {"kind": "talks:Talks", "options": talk},
        "rollout": {
            "group_size": group_size,
            "max_in_flight": 4 * group_size,
            "max_new_tokens": 8,
            "max_prompt_tokens": 120,
        },
        "engine": {"kind": "scripted"},
        "objective": {"filter_zero_variance": True},
        "trainer": {"steps": steps, "groups_per_step": groups_per_step, "optimizer": {"lr": 1e-3}},
    }
    return Run(parse_config(table, "talks"))


def test_agents_of_whom_none_can_pass_end_the_run_with_the_count(tmp_path: Path) -> None:
    with pytest.raises(NoProgressError, match=rf"{FRUITLESS_BATCHES} variance"):
        run_of(tmp_path, {"turns": 1, "tasks": 8, "hopeless": 8}, 2, 1, 1000).start()
    (folder,) = (tmp_path / "runs").iterdir()
    require_sound(folder)
    with LedgerReader(folder / "ledger") as reader:
        ended = reader.latest(RunEnded)
        steps = reader.events(StepTaken)
        closed = Counter(entry.event.fate for entry in reader.events(OccurrenceClosed))
        moves = Counter(
            (entry.event.state, entry.event.fate)
            for entry in reader.events(AttemptMoved)
            if entry.event.state is not AttemptState.BUFFERED
        )
    assert ended is not None
    assert "NoProgressError" in ended.event.reason
    assert not steps
    assert closed == {Fate.VARIANCE: FRUITLESS_BATCHES}
    assert moves[AttemptState.FILTERED, Fate.VARIANCE] == 2 * FRUITLESS_BATCHES
    assert set(moves) <= {(AttemptState.FILTERED, Fate.VARIANCE), (AttemptState.DROPPED, Fate.STOPPED)}


def test_what_is_filtered_is_replaced_by_what_passes(tmp_path: Path) -> None:
    options = TalkOptions(tasks=8, hopeless=4)
    result = run_of(tmp_path, options.model_dump(), 4, 2, 3).start()
    assert result.reason == "steps"
    require_sound(result.folder)
    with LedgerReader(result.folder / "ledger") as reader:
        task_of = {entry.event.group: entry.event.task for entry in reader.events(GroupStarted)}
        closed = {entry.event.group: entry.event.fate for entry in reader.events(OccurrenceClosed)}
        trained = [{use.group for use in reader.rows_at(step)} for step in (1, 2, 3)]
    assert [len(groups) for groups in trained] == [2, 2, 2], "every batch is full"
    hopeless = {group for group, task in task_of.items() if task in hopeless_of(options)}
    assert not hopeless & set().union(*trained)
    assert {closed[group] for group in hopeless & set(closed)} == {Fate.VARIANCE}
