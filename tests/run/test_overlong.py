"""Rewards shaped by length: what is paid, where it is written down, and what is left alone."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from fathom.config.objective import ObjectiveConfig
from fathom.core.errors import ConfigError
from fathom.core.records.trajectory import Graded, Trajectory, Ungraded
from fathom.run.rollouts.overlong import overlong_penalty, shaped, shaping
from synthetic.records import trajectory

VECTORS = json.loads((Path(__file__).parent.parent / "trainer" / "named_vectors.json").read_text(encoding="utf-8"))[
    "overlong_shaping"
]


class _Played:
    def __init__(self, record: Trajectory) -> None:
        self._record = record

    async def run(self, plan: object) -> Trajectory:
        return self._record


def graded(record: Trajectory) -> Graded:
    assert isinstance(record.header.reward, Graded)
    return record.header.reward


def test_penalties():
    limit, buffer = VECTORS["inputs"]["L_max"], VECTORS["inputs"]["L_cache"]
    for length, expected in VECTORS["expected"].items():
        assert overlong_penalty(int(length), limit, buffer) == expected


def test_the_penalty_is_a_component_beside_the_others():
    record = trajectory()
    length, before = record.payload.num_sampled, graded(record)
    after = graded(shaped(record, limit=length, buffer=length))
    assert after.components == before.components | {"overlong": -1.0}
    assert after.total == before.total - 1
    assert after.grader.startswith(before.grader)
    assert graded(shaped(record, limit=length + 9, buffer=9)).components["overlong"] == 0


def test_what_was_not_graded_stays_so():
    record = trajectory()
    header = replace(record.header, reward=Ungraded(cause="grader_timeout", detail=""))
    record = replace(record, header=header)
    assert shaped(record, 4, 2) is record


def test_a_task_with_a_component_of_that_name_is_refused():
    record = shaped(trajectory(), 8, 4)
    with pytest.raises(ConfigError, match="of its own"):
        shaped(record, 8, 4)


def test_only_an_objective_that_shapes_has_its_rollouts_shaped():
    played = _Played(trajectory())
    assert shaping(played, ObjectiveConfig()) is played
    runner = shaping(played, ObjectiveConfig(overlong_limit=8, overlong_buffer=4))
    made = asyncio.run(runner.run(None))  # pyright: ignore[reportArgumentType]  the player asks for no plan
    assert "overlong" in graded(made).components
