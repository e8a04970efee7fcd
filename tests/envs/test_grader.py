from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hostile_environments as hostile
import pytest
from hostile_environments import TASK, Hostile

from fathom.core.errors import ConfigError, GraderDeadError
from fathom.core.records.trajectory import Graded, Ungraded
from fathom.envs.grading import Grader

TIMEOUT_S = 1.0


def descendants(root: int) -> dict[int, str]:
    """Command line by process id of everything below `root` that runs (zombies are gone)."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    found: set[int] = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in found - {root} if "resource_tracker" not in commands[pid]}


async def settle(processes: int) -> None:
    """Wait until this process has that many descendants: a worker that was killed is replaced within a moment."""
    async with asyncio.timeout(30):
        while len(descendants(os.getpid())) != processes:
            await asyncio.sleep(0.02)


def wait_until_gone(pids: set[int], seconds: float = 30.0) -> set[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = {pid for pid in pids if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)}
        if not alive:
            return set()
        time.sleep(0.02)
    return alive


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_hanging_graders_end_and_block_nobody():
    deeds = ["loop", "regex", "sleep", "power", "signals", "child"]

    async def scenario():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        async with Grader(Hostile(), workers=len(deeds) + 1, timeout_s=TIMEOUT_S) as grader:
            ticker = asyncio.create_task(tick())
            for _ in range(2):
                began, ticks_before = time.monotonic(), ticks
                rewards = await asyncio.gather(*(grader.grade(TASK, deed) for deed in [*deeds, "good", "good"]))
                assert time.monotonic() - began < TIMEOUT_S + 20, "the longest deed takes a minute"
                assert ticks - ticks_before > 5
                assert [r.cause for r in rewards if isinstance(r, Ungraded)] == ["grader_timeout"] * len(deeds)
                assert [r.total for r in rewards if isinstance(r, Graded)] == [1.0, 1.0]
                await settle(len(deeds) + 2)
            ticker.cancel()

    asyncio.run(scenario())
    assert descendants(os.getpid()) == {}


def test_one_worker_goes_on_at_once_after_a_hang():
    async def scenario():
        async with Grader(Hostile(), workers=1, timeout_s=TIMEOUT_S) as grader:
            first = await grader.grade(TASK, "pid")
            began = time.monotonic()
            rewards = await asyncio.gather(*(grader.grade(TASK, deed) for deed in ["sleep", "good", "sleep", "pid"]))
            assert time.monotonic() - began < 20
            return first, rewards

    first, (slept, good, slept_again, pid) = asyncio.run(scenario())
    assert isinstance(slept, Ungraded)
    assert isinstance(slept_again, Ungraded)
    assert good.total == 1.0
    assert pid.total != first.total


def test_a_caller_that_gives_up_frees_the_worker():
    async def scenario():
        async with Grader(Hostile(), workers=1, timeout_s=60.0) as grader:
            waiting = asyncio.create_task(grader.grade(TASK, "loop"))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return await asyncio.wait_for(grader.grade(TASK, "good"), timeout=30)

    assert asyncio.run(scenario()).total == 1.0


def test_close_ends_busy_workers():
    async def scenario():
        grader = Grader(Hostile(), workers=2, timeout_s=60.0)
        await grader.start()
        waiting = asyncio.create_task(grader.grade(TASK, "loop"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await grader.close()
        assert time.monotonic() - began < 20
        await grader.close()
        return await waiting, await asyncio.wait_for(grader.grade(TASK, "good"), timeout=30)

    busy, late = asyncio.run(scenario())
    assert busy.cause == late.cause == "grader_died"
    assert descendants(os.getpid()) == {}


def test_a_dead_nursery_is_an_error_that_says_what_to_do():
    async def scenario():
        async with Grader(Hostile(), workers=1, timeout_s=5.0) as grader:
            os.kill(min(descendants(os.getpid())), signal.SIGKILL)  # the nursery is older than its workers
            await settle(0)
            for _ in range(3):
                with pytest.raises(GraderDeadError, match="resume"):
                    await asyncio.wait_for(grader.grade(TASK, "good"), timeout=30)

    asyncio.run(scenario())
    assert descendants(os.getpid()) == {}


@pytest.mark.parametrize("deed", ["loop", "regex", "sleep"])
def test_kill_9_of_the_run_leaves_no_worker(deed):
    script = Path(hostile.__file__)
    run = subprocess.Popen([sys.executable, str(script), deed], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    pids = set(descendants(run.pid))
    assert worker in pids
    assert len(pids) == 3, "a nursery and two workers"
    run.kill()
    run.wait()
    run.stdout.close()
    assert wait_until_gone(pids) == set()


def test_requests_to_stop_are_the_runs_to_handle():
    script = Path(hostile.__file__)
    run = subprocess.Popen(
        [sys.executable, str(script), "sleep"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    pids = set(descendants(run.pid))
    assert worker in pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert set(descendants(run.pid)) == pids
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert "fathom-graders" not in errors, "only the run itself reports Ctrl-C"
    assert wait_until_gone(pids) == set()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (hostile.Unpicklable(), "cannot be sent"),
        (hostile.ExplodesElsewhere(), "cannot be loaded in a grader process: ValueError"),
        (hostile.VanishesElsewhere(), "exit code 7"),
    ],
)
def test_an_environment_that_cannot_travel_is_refused(environment, message):
    async def scenario():
        async with Grader(environment, workers=1, timeout_s=1.0):
            pass

    with pytest.raises(ConfigError, match=message):
        asyncio.run(scenario())
    assert descendants(os.getpid()) == {}


def test_a_script_that_forgets_to_close_still_ends():
    code = (
        "import asyncio, hostile_environments as h\n"
        "from fathom.envs.grading import Grader\n"
        "if __name__ == '__main__':\n"
        "    loop = asyncio.new_event_loop()\n"
        "    grader = Grader(h.Hostile(), workers=1, timeout_s=5.0)\n"
        "    loop.run_until_complete(grader.start())\n"
        "    print(loop.run_until_complete(grader.grade(h.TASK, 'good')).total)\n"
    )
    folder = Path(hostile.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "1.0\n"


def test_no_workers_is_refused():
    with pytest.raises(ConfigError, match="grader_workers"):
        Grader(Hostile(), workers=0, timeout_s=1.0)
