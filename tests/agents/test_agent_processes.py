"""Whatever happens in an episode: it ends in time, its cause is told, the next one is unharmed, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
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

LONG_S = 60.0
PATIENT = LimitsConfig(boot_s=LONG_S, agent_s=LONG_S, grade_s=LONG_S, close_s=LONG_S, grace_s=1.0)
NEVER_OVER = {
    "boot": ("boot:hang", "boot:block"),
    "act": ("act:hang", "act:resist", "act:block", "act:spin", "act:resist_all"),
    "grade": ("grade:hang", "grade:resist", "grade:spin"),
    "close": ("close:hang", "close:resist_all"),
}
SHORT = {phase: PATIENT.model_copy(update={f"{'agent' if phase == 'act' else phase}_s": 1.0}) for phase in NEVER_OVER}
"""Only the phase that is never over has a short limit."""
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
    processes = AgentProcesses(Deeds(), PATIENT)
    loop.run_until_complete(processes.start())
    yield processes
    loop.run_until_complete(processes.close())


@pytest.fixture(scope="module")
def commands(loop):
    processes = AgentProcesses(Commands(), PATIENT)
    loop.run_until_complete(processes.start())
    yield processes
    loop.run_until_complete(processes.close())


@pytest.fixture(scope="module")
def overdue(loop):
    """What became of the deeds that are never over, and what was told; all side by side, with nothing left of them."""

    async def play_all():
        async with AsyncExitStack() as stack:
            all_of = {
                phase: await stack.enter_async_context(AgentProcesses(Deeds(), limits))
                for phase, limits in SHORT.items()
            }
            before, open_before = processes_below(os.getpid()), descriptors()
            told = {deed: Told() for deeds in NEVER_OVER.values() for deed in deeds}
            played = await asyncio.gather(
                *(all_of[deed.partition(":")[0]].play(task(deed), ENDPOINT, told[deed]) for deed in told)
            )
            assert processes_below(os.getpid()) == before
            assert descriptors() == open_before
            for processes in all_of.values():
                assert isinstance((await processes.play(task(), ENDPOINT, Told())).reward, Graded)
            return {deed: (ended, told[deed].heard) for deed, ended in zip(told, played, strict=True)}

    return loop.run_until_complete(play_all())


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


def ended(loop, deeds, overdue, deed: str) -> tuple[Played, list[tuple[Acting, str]]]:
    """How an episode with this deed ended, and what was told."""
    if deed in overdue:
        return overdue[deed]
    told = Told()
    return play(loop, deeds, task(deed), told), told.heard


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
def test_faults_are_ungraded_with_their_cause(loop, deeds, overdue, deed, cause, acting):
    played, heard = ended(loop, deeds, overdue, deed)
    assert isinstance(played.reward, Ungraded)
    assert (played.reward.cause, played.acting) == (cause, acting)
    assert played.reward.detail
    assert len(heard) == (acting is not None)
    assert isinstance(play(loop, deeds, task()).reward, Graded)


@pytest.mark.parametrize(
    ("deed", "acting", "detail"),
    [
        ("act:raise", Acting.FAILED, "ValueError: as asked"),
        ("act:exit", Acting.FAILED, "SystemExit: 3"),
        ("act:hang", Acting.TIMEOUT, "not over within 1 s"),
        ("act:resist", Acting.TIMEOUT, "not over"),
        ("act:block", Acting.TIMEOUT, "not over"),
        ("act:spin", Acting.TIMEOUT, "not over"),
    ],
)
def test_what_an_agent_left_is_graded_however_it_ended(loop, deeds, overdue, deed, acting, detail):
    played, heard = ended(loop, deeds, overdue, deed)
    assert isinstance(played.reward, Graded)
    assert played.acting is acting
    assert detail in played.detail
    assert heard == [(acting, played.detail)]


@pytest.mark.parametrize("deed", ["close:hang", "close:die", "close:raise", "close:resist_all"])
def test_a_fault_of_closing_takes_no_reward_back(loop, deeds, overdue, deed):
    played, _ = ended(loop, deeds, overdue, deed)
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


def test_one_that_hangs_delays_nobody(loop, deeds):
    async def all_of_them():
        hung = asyncio.create_task(deeds.play(task("boot:hang"), ENDPOINT, Told()))
        others = await asyncio.gather(*(deeds.play(task("act:leave"), ENDPOINT, Told()) for _ in range(7)))
        assert not hung.done()
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)
        return others

    before = processes_below(os.getpid())
    assert all(isinstance(played.reward, Graded) for played in loop.run_until_complete(all_of_them()))
    assert processes_below(os.getpid()) == before


def test_a_run_that_gives_an_episode_up_ends_its_processes(loop, deeds):
    async def give_up():
        playing = asyncio.create_task(deeds.play(task("boot:leave", "act:block"), ENDPOINT, Told()))
        while len(processes_below(os.getpid())) < len(before) + 6:  # itself and the five that it leaves
            await asyncio.sleep(0.02)
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
    processes = AgentProcesses(Deeds(), PATIENT)
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
    ],
)
def test_a_program_is_an_agent(loop, commands, command, acting, detail):
    played = play(loop, commands, Task(id="t", messages=(), answer=command))
    assert played.acting is acting
    assert detail in played.detail
    assert isinstance(played.reward, Graded)


def test_a_program_that_is_out_of_time_is_killed(loop):
    processes = AgentProcesses(Commands(), PATIENT.model_copy(update={"agent_s": 1.0}))
    loop.run_until_complete(processes.start())
    played = play(loop, processes, Task(id="t", messages=(), answer="trap '' TERM INT; sleep 3600; sleep 3600"))
    loop.run_until_complete(processes.close())
    assert (played.acting, "not over" in played.detail) == (Acting.TIMEOUT, True)
    assert isinstance(played.reward, Graded)


def test_kill_9_of_the_run_leaves_nothing_of_an_episode():
    run = subprocess.Popen([sys.executable, str(Path(agent_deeds.__file__))], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    started = {int(pid) for pid in run.stdout.readline().split()}
    assert len(started) >= 8, "a resource tracker, a keeper, an episode and five that it started"
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 30
    while left := {pid for pid in started if is_running(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """It is there, and not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
