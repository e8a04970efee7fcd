from __future__ import annotations

import asyncio
import socket
import threading

import hostile_environments as hostile
import pytest
from hostile_environments import TASK, Hostile

from fathom.core.records.trajectory import Ungraded
from fathom.core.wire import frame
from fathom.envs.grading import Grader
from fathom.envs.grading.worker import GradeRequest, serve


@pytest.fixture(scope="module")
def running_grader():
    loop = asyncio.new_event_loop()
    grader = Grader(Hostile(), workers=1, timeout_s=5.0, memory_bytes=1 << 30)
    loop.run_until_complete(grader.start())
    yield loop, grader
    loop.run_until_complete(grader.close())
    loop.close()


@pytest.mark.parametrize(
    ("deed", "cause", "detail"),
    [
        ("exit", "grader_died", "task t"),
        ("segfault", "grader_died", "task t"),
        ("memory", "grader_error", "MemoryError"),
        ("raise", "grader_error", "division by zero"),
        ("sys_exit", "grader_error", "SystemExit: 3"),
        ("surrogate", "grader_error", "invalid literal"),
        ("float", "grader_error", "returned float"),
        ("none", "grader_error", "returned NoneType"),
        ("text", "grader_error", ""),
        ("nan", "grader_error", "finite"),
        ("tampered", "grader_error", "finite"),
        ("overflow", "grader_error", "finite"),
    ],
)
def test_a_failure_is_ungraded_with_its_cause(running_grader, deed, cause, detail):
    loop, grader = running_grader
    reward = loop.run_until_complete(grader.grade(TASK, deed))
    assert isinstance(reward, Ungraded)
    assert reward.cause == cause
    assert detail in reward.detail
    assert loop.run_until_complete(grader.grade(TASK, "good")) == hostile.reward(1.0)


def test_no_worker_loads_torch(running_grader):
    loop, grader = running_grader
    assert loop.run_until_complete(grader.grade(TASK, "modules")).total == 0.0


def test_text_that_cannot_be_sent_is_ungraded(running_grader):
    loop, grader = running_grader
    assert loop.run_until_complete(grader.grade(TASK, "\ud800")).cause == "grader_error"


def test_a_long_answer_arrives_whole(running_grader):
    loop, grader = running_grader
    reward = loop.run_until_complete(grader.grade(TASK, "x" * 3_000_000))
    assert reward.cause == "grader_error"  # KeyError of the whole text, cut for people
    assert len(reward.detail) < 3000


def test_a_worker_whose_run_was_killed_before_it_read_the_answer_just_ends():
    run, line = socket.socketpair()
    ended: list[str] = []

    def work() -> None:
        serve(Hostile(), line)
        ended.append("quietly")

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    run.sendall(frame(GradeRequest(task=TASK, answer="score 1")))
    assert run.recv(1, socket.MSG_PEEK)
    run.close()  # with the answer unread: the other end is told by an error
    worker.join(30)
    line.close()
    assert ended == ["quietly"]
