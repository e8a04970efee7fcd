"""Whatever happens in an episode: it ends in time, its cause is told, the next one is unharmed, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import agent_deeds
import pytest
from agent_deeds import Commands, Deeds, task

from fathom.config.agent import LimitsConfig
from fathom.core.errors import GraderDeadError
from fathom.core.ports.agent import Acting, Endpoint, Played, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.agents import AgentProcesses

LIMITS = LimitsConfig(boot_s=0.3, agent_s=0.3, grade_s=0.3, close_s=0.3, grace_s=0.2)
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1", key="k", model="policy")


class Told:
    """Tells the same transcript always, and remembers what it was told."""

    def __init__(self, instead: Ungraded | None = None) -> None:
        self.instead = instead
        self.heard: list[tuple[Acting, str]] = []

    async def __call__(self, acting: Acting, detail: str) -> Transcript | Ungraded:
        self.heard.append((acting, detail))
        messages = (Message(role=Role.USER, content="hi"), Message(role=Role.ASSISTANT, content="ho"))
        return self.instead or Transcript(messages=messages, finish_reasons=(), acting=acting, detail=detail)


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def deeds(loop):
    processes = AgentProcesses(Deeds(), LIMITS)
    loop.run_until_complete(processes.start())
    yield processes
    loop.run_until_complete(processes.close())


@pytest.fixture(scope="module")
def commands(loop):
    processes = AgentProcesses(Commands(), LIMITS)
    loop.run_until_complete(processes.start())
    yield processes
    loop.run_until_complete(processes.close())


def processes_below(root: int) -> set[int]:
    """Everything below `root`, ended processes that nobody waited for included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def play(loop, processes, of: Task, told: Told | None = None) -> Played:
    """One episode; no process and no descriptor is left of it."""
    before, open_before = processes_below(os.getpid()), descriptors()
    played = loop.run_until_complete(processes.play(of, ENDPOINT, told or Told()))
    assert processes_below(os.getpid()) == before
    assert descriptors() == open_before
    return played


def test_an_episode_is_graded_by_what_was_said(loop, deeds):
    told = Told()
    played = play(loop, deeds, task(), told)
    assert isinstance(played.reward, Graded)
    assert played.reward.total == 2.0
    assert (played.acting, played.detail, played.fault) == (Acting.ENDED, "", "")
    assert told.heard == [(Acting.ENDED, "")]


@pytest.mark.parametrize(
    ("deed", "cause", "acting"),
    [
        ("make:raise", "boot_error", None),
        ("boot:raise", "boot_error", None),
        ("boot:exit", "boot_error", None),
        ("boot:hang", "boot_timeout", None),
        ("boot:block", "boot_timeout", None),
        ("boot:die", "boot_died", None),
        ("act:die", "agent_died", Acting.FAILED),
        ("act:resist_all", "agent_died", Acting.FAILED),
        ("grade:raise", "grader_error", Acting.ENDED),
        ("grade:exit", "grader_error", Acting.ENDED),
        ("reward:nan", "grader_error", Acting.ENDED),
        ("grade:hang", "grader_timeout", Acting.ENDED),
        ("grade:resist", "grader_timeout", Acting.ENDED),
        ("grade:spin", "grader_timeout", Acting.ENDED),
        ("grade:die", "grader_died", Acting.ENDED),
    ],
)
def test_faults_are_ungraded_with_their_cause(loop, deeds, deed, cause, acting):
    told = Told()
    played = play(loop, deeds, task(deed), told)
    assert isinstance(played.reward, Ungraded)
    assert (played.reward.cause, played.acting) == (cause, acting)
    assert played.reward.detail
    assert len(told.heard) == (acting is not None)
    assert isinstance(play(loop, deeds, task()).reward, Graded)


@pytest.mark.parametrize(
    ("deed", "acting", "detail"),
    [
        ("act:raise", Acting.FAILED, "ValueError: as asked"),
        ("act:exit", Acting.FAILED, "SystemExit: 3"),
        ("act:hang", Acting.TIMEOUT, "not over within 0.3 s"),
        ("act:resist", Acting.TIMEOUT, "not over"),
        ("act:block", Acting.TIMEOUT, "not over"),
        ("act:spin", Acting.TIMEOUT, "not over"),
    ],
)
def test_what_an_agent_left_is_graded_however_it_ended(loop, deeds, deed, acting, detail):
    told = Told()
    played = play(loop, deeds, task(deed), told)
    assert isinstance(played.reward, Graded)
    assert played.acting is acting
    assert detail in played.detail
    assert told.heard == [(acting, played.detail)]


@pytest.mark.parametrize("deed", ["close:hang", "close:die", "close:raise", "close:resist_all"])
def test_a_fault_of_closing_takes_no_reward_back(loop, deeds, deed):
    played = play(loop, deeds, task(deed))
    assert isinstance(played.reward, Graded)
    assert played.fault


@pytest.mark.parametrize("phase", ["boot", "act", "grade", "close"])
def test_nothing_that_an_episode_started_outlives_it(loop, deeds, phase):
    assert isinstance(play(loop, deeds, task(f"{phase}:leave")).reward, Graded)
    play(loop, deeds, task(f"{phase}:leave", "grade:die"))


def test_what_is_not_to_be_graded_is_not(loop, deeds):
    cause = Ungraded(cause="engine_error", detail="gone")
    played = play(loop, deeds, task("grade:die"), Told(cause))
    assert played.reward == cause
    assert played.fault == ""


def test_episodes_run_side_by_side_and_one_that_hangs_delays_nobody(loop, deeds):
    async def all_of_them():
        plays = [deeds.play(task(deed), ENDPOINT, Told()) for deed in ["boot:hang", *["act:leave"] * 7]]
        return await asyncio.gather(*plays)

    before = processes_below(os.getpid())
    hung, *others = loop.run_until_complete(all_of_them())
    assert hung.reward.cause == "boot_timeout"
    assert all(isinstance(played.reward, Graded) for played in others)
    assert processes_below(os.getpid()) == before


def test_a_run_that_gives_an_episode_up_ends_its_processes(loop, deeds):
    async def give_up():
        playing = asyncio.create_task(deeds.play(task("boot:leave", "act:block"), ENDPOINT, Told()))
        await asyncio.sleep(0.1)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    before, open_before = processes_below(os.getpid()), descriptors()
    loop.run_until_complete(give_up())
    assert processes_below(os.getpid()) == before
    assert descriptors() == open_before


def test_a_transcript_that_is_no_text_is_a_fault_of_grading(loop, deeds):
    class Surrogate(Told):
        async def __call__(self, acting, detail):
            message = Message(role=Role.ASSISTANT, content="\ud800")
            return Transcript(messages=(message,), finish_reasons=(), acting=acting, detail=detail)

    assert play(loop, deeds, task(), Surrogate()).reward.cause == "grader_error"


def test_closed_processes_play_nothing(loop):
    processes = AgentProcesses(Deeds(), LIMITS)
    loop.run_until_complete(processes.start())
    loop.run_until_complete(processes.close())
    with pytest.raises(GraderDeadError):
        loop.run_until_complete(processes.play(task(), ENDPOINT, Told()))


@pytest.mark.parametrize(
    ("command", "acting", "detail"),
    [
        ('test "$OPENAI_BASE_URL $OPENAI_API_KEY $1" = "http://127.0.0.1:1/v1 k policy"', Acting.ENDED, ""),
        ('test "$ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY" = "http://127.0.0.1:1 k"', Acting.ENDED, ""),
        ('test "$MINE" = yes && test -z "$PYTEST_CURRENT_TEST"', Acting.ENDED, ""),
        ("sleep 3600 & setsid sleep 3600 & true", Acting.ENDED, ""),
        ("echo 'no such file' >&2; exit 3", Acting.FAILED, "sh ended with exit code 3: no such file"),
        ("kill -9 $$", Acting.FAILED, "SIGKILL: it wrote nothing"),
        ("trap '' TERM INT; sleep 3600; sleep 3600", Acting.TIMEOUT, "not over"),
    ],
)
def test_a_program_is_an_agent(loop, commands, command, acting, detail):
    played = play(loop, commands, Task(id="t", messages=(), answer=command))
    assert played.acting is acting
    assert detail in played.detail
    assert isinstance(played.reward, Graded)


def test_kill_9_of_the_run_leaves_nothing_of_an_episode():
    run = subprocess.Popen([sys.executable, str(Path(agent_deeds.__file__))], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    started = {int(pid) for pid in run.stdout.readline().split()}
    assert len(started) >= 8, "a resource tracker, a keeper, an episode and five that it started"
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 10
    while left := {pid for pid in started if is_running(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """It is there, and not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
