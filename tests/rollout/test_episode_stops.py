"""Where an answer ends: for the record with a token, for the grader with a character."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fathom.core.ids import Occurrence, PolicyVersion, TaskId, group_id
from fathom.core.manifest import DiskSource, Manifest
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import FinishReason, InFlightMode, Purpose, SamplingParams
from fathom.core.records.trajectory import Graded, Reward, TokenizerIdentity, Trajectory, TrajectoryStatus
from fathom.rollout.engines.scripted.script import Replies, Reply
from fathom.rollout.engines.scripted.scripted_engine import ScriptedEngine
from fathom.rollout.episode import EpisodePlan, EpisodeRunner
from fathom.rollout.router.router import Router

PROMPT = np.array([5, 6], np.int32)
SAID = tuple(ord(character) for character in "12;\n\nQ: 3")


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def episode(stop_strings: tuple[str, ...]) -> tuple[Trajectory, str]:
    """What is recorded of the answer `SAID`, and the text that the grader got."""
    graded: list[str] = []

    async def grade(task: Task, answer: str) -> Reward:
        graded.append(answer)
        return Graded(components={"score": 1.0}, grader="g/1", answer_found=True)

    async def run() -> Trajectory:
        engine = ScriptedEngine(Replies(lambda _: Reply(token_ids=SAID)), decode=letters)
        version = PolicyVersion(incarnation=1, number=0, digest="0" * 64)
        await engine.stage(Manifest(version=version, parent=None, tensors=()), DiskSource(path="unread"))
        await engine.verify()
        await engine.commit(version, InFlightMode.CONTINUE)
        runner = EpisodeRunner(
            router=Router(lambda: [engine], lambda _, reason: pytest.fail(reason)),
            decode=letters,
            grade=grade,
            stop_ids=(),
            stop_strings=stop_strings,
            record_routes=False,
            tokenizer=TokenizerIdentity("aa", "bb"),
        )
        occurrence = Occurrence(0, 0)
        return await runner.run(
            EpisodePlan(
                group=group_id(occurrence, 0, 1),
                member=0,
                occurrence=occurrence,
                attempt=0,
                task=Task(id=TaskId("t"), messages=(), answer=""),
                prompt_ids=PROMPT,
                sampling=SamplingParams(),
                max_new_tokens=64,
                seed=0,
                priority=0,
                purpose=Purpose.ROLLOUT,
                pinned=None,
                barrier=None,
            )
        )

    record = asyncio.run(run())
    return record, graded[0]


@pytest.mark.parametrize(
    ("stop_strings", "tokens", "text"),
    [
        ((), len(SAID), "12;\n\nQ: 3"),
        (("\n\n",), 5, "12;"),
        (("Q:", "\n\nQ"), 6, "12;"),
        ((";\n\nQ: 4", "3"), len(SAID), "12;\n\nQ: "),
    ],
)
def test_the_record_ends_with_a_token_and_the_graders_text_before_the_stop_string(
    stop_strings: tuple[str, ...], tokens: int, text: str
) -> None:
    record, graded = episode(stop_strings)
    (branch,) = record.payload.branches
    assert tuple(branch.token_ids[branch.sampled].tolist()) == SAID[:tokens]
    assert record.header.status is TrajectoryStatus.COMPLETED
    assert branch.turns[0].finish_reason is FinishReason.STOP
    assert graded == text
