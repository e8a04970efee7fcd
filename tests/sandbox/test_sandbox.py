"""The sandbox as its users see it: commands in one shell, files in and out, an end that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fathom.core.errors import ConfigError, SandboxError
from fathom.envs.sandbox import Ended, Limits, PlacedFile, Ran, Sandbox, SandboxSpec

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
PROJECT = Path(__file__).resolve().parents[2]


def live(parent: int | None = None) -> set[int]:
    """Processes of sandboxes that belong to this one (or to `parent`), by what only they have in their command."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (
                stat[0] != "Z"
                and command.startswith((b"/usr/bin/bwrap", b"bwrap"))
                and int(stat[1]) == (parent or os.getpid())
            ):
                found.add(int(entry.name))
    return found


def inside(bwrap: int) -> set[int]:
    """`bwrap` and all processes below it."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, set()).add(int(entry.name))
    found, new = {bwrap}, {bwrap}
    while new:
        new = set().union(*(children.get(pid, set()) for pid in new)) - found
        found |= new
    return found


def exist(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def runs_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    mounts, folders = Path("/proc/mounts").read_text().count("sandbox"), set(Path("/tmp").glob("bubblewrap*"))
    yield
    assert not live()
    assert Path("/proc/mounts").read_text().count("sandbox") == mounts
    assert set(Path("/tmp").glob("bubblewrap*")) <= folders


def ran(*commands: str, spec: SandboxSpec | None = None, timeout_s: float = 20.0) -> list[Ran]:
    async def go() -> list[Ran]:
        async with Sandbox(spec or SandboxSpec()) as sandbox:
            return [await sandbox.run(command, timeout_s) for command in commands]

    return asyncio.run(go())


def test_one_shell_runs_all_commands() -> None:
    first, second, third, fourth, fifth = ran(
        "X=5; mkdir a && cd a; f() { echo f$X; }", "pwd; f; echo e >&2", "false", "if", "cat; printf 'a\\377b'"
    )
    assert (first.exit_code, first.stdout, first.stderr, first.ended) == (0, "", "", Ended.EXITED)
    assert (second.stdout, second.stderr) == ("/task/a\nf5\n", "e\n")
    assert third.exit_code == 1
    assert fourth.exit_code != 0
    assert "syntax error" in fourth.stderr
    assert fifth.stdout == "a\ufffdb"  # and standard input is empty


def test_a_command_that_ends_the_shell_is_told_and_the_next_gets_a_new_one() -> None:
    left, after, killed, again = ran("cd /tmp; X=1; :", "exit 3", "kill -9 $$", "echo ${X-gone} $(pwd)")
    assert left.exit_code == 0
    assert (after.exit_code, after.ended) == (3, Ended.SHELL_ENDED)
    assert (killed.exit_code, killed.ended) == (128 + signal.SIGKILL, Ended.SHELL_ENDED)
    assert again.stdout == "gone /tmp\n"


def test_what_runs_in_the_background_does_not_hold_up_the_answer_and_lives_on() -> None:
    first, second = ran("sleep 100 & echo $!", "jobs -r | wc -l")
    assert first.stdout.strip().isdigit()
    assert second.stdout.strip() == "1"


def test_a_command_that_takes_too_long_is_killed_with_all_it_started() -> None:
    async def go() -> tuple[Ran, Ran]:
        async with Sandbox(SandboxSpec()) as sandbox:
            await sandbox.run("cd /tmp", 20)
            late = await sandbox.run("setsid sleep 300 & echo begun; sleep 300", 0.4)
            return late, await sandbox.run("pwd; ls -d /proc/[0-9]* | wc -l", 20)

    late, after = asyncio.run(go())
    assert (late.exit_code, late.timed_out, late.stdout) == (None, True, "begun\n")
    where, count = after.stdout.split()
    assert where == "/tmp"
    assert int(count) <= 4  # process 1, the shell, ls, wc


@pytest.mark.parametrize(
    "command",
    [
        "cat /etc/shadow",
        f"ls {PROJECT}",
        f"ls {Path.home()}",
        "ls /var /mnt /srv /opt",
        "echo x > /usr/bin/true",
        "echo x > /x",
        "echo x > /dev/x",
        "echo x > /etc/passwd",
        "kill -9 1 && sleep 0.1 && ls /proc/1/fd",
        "cat /proc/1/environ",
        "unshare -Ur true",
        "mount -t tmpfs none /tmp",
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 22), 2)'",
        "python3 -c 'import socket; socket.create_connection((\"8.8.8.8\", 53), 2)'",
        "python3 -c 'import os; os.setuid(0)'",
        "ulimit -u 10000",
        "python3 -c 'import os; os.memfd_create(\"x\")'",
        "python3 -c 'import ctypes; exit(ctypes.CDLL(None).shmget(0, 4096, 0o1600) == -1)'",
        "python3 -c 'import ctypes; exit(ctypes.CDLL(None).syscall(425, 1, 0) == -1)'",
        "mknod /tmp/disk b 254 0",
        "head -c 30000000 /dev/zero > /dev/shm/a && head -c 30000000 /dev/zero > /task/b && "
        "head -c 30000000 /dev/zero > /task/c && head -c 30000000 /dev/zero > /task/d",
    ],
)
def test_what_is_not_its_own_is_out_of_reach(command: str) -> None:
    tried, after = ran(command, "echo well")
    assert tried.exit_code not in (0, None)
    assert after.stdout == "well\n"


def test_only_the_environment_that_was_given_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_SECRET", "secret")
    (seen,) = ran("env; id -u; hostname", spec=SandboxSpec(env=(("A", "b c"),)))
    assert "secret" not in seen.stdout
    assert "A=b c\n" in seen.stdout
    assert seen.stdout.endswith("1000\nsandbox\n")


def test_a_fork_bomb_ends_with_its_time() -> None:
    async def go() -> tuple[Ran, int, Ran]:
        async with Sandbox(SandboxSpec(limits=Limits(num_processes=20))) as sandbox:
            (bwrap,) = live()
            bomb = asyncio.create_task(sandbox.run("b() { b | b & b; }; b; sleep 100", 3.0))
            most = 0
            while not bomb.done():
                most = max(most, len(inside(bwrap)))
                await asyncio.sleep(0.05)
            return await bomb, most, await sandbox.run("echo well", 20)

    bomb, most, after = asyncio.run(go())
    assert bomb.exit_code != 0
    assert 5 < most <= 22
    assert after.stdout == "well\n"


def test_memory_is_bounded_for_one_process_and_for_all() -> None:
    one = "python3 -c 'x = bytearray(300 << 20)'"
    many = "for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(80 << 20); time.sleep(30)' & done; wait"
    limits = Limits(memory_bytes=200 << 20)
    single, together, after = ran(one, many, "echo well", spec=SandboxSpec(limits=limits))
    assert single.exit_code == 1
    assert "MemoryError" in single.stderr
    assert together.ended is Ended.MEMORY
    assert after.stdout == "well\n"


def test_processor_time_and_file_size_are_bounded() -> None:
    limits = Limits(cpu_s=1, file_bytes=1000)
    spin, big = ran("bash -c 'while :; do :; done'", "head -c 2000 /dev/zero > f", spec=SandboxSpec(limits=limits))
    assert spin.exit_code == 128 + signal.SIGKILL
    assert big.exit_code != 0


def test_of_long_output_start_and_end_are_kept_and_endless_output_ends() -> None:
    limits = Limits(output_bytes=100)
    long, endless, after = ran("seq 1 100000", "yes", "echo well", spec=SandboxSpec(limits=limits), timeout_s=60)
    assert long.truncated
    assert long.stdout.startswith("1\n2\n")
    assert long.stdout.endswith("99999\n100000\n")
    assert "[... 588795 bytes left out ...]" in long.stdout
    assert endless.ended is Ended.OUTPUT
    assert (after.stdout, after.truncated) == ("well\n", False)


def test_files_go_in_and_out() -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            await sandbox.put(
                [
                    PlacedFile(path="/task/a/b/run.sh", content=b"#!/bin/sh\necho ran", executable=True),
                    PlacedFile(path="/task/\u00e9", content=b"\0\xff"),
                ]
            )
            assert (await sandbox.run("a/b/run.sh", 20)).stdout == "ran\n"
            assert await sandbox.get("/task/\u00e9") == b"\0\xff"
            assert await sandbox.get("/task/none") is None
            assert await sandbox.get("/task/none/none") is None
            await sandbox.run(
                "mkdir -p a/c/d/e && touch a/c/d/x && chmod 000 a/c/d a/c && ln -s /usr a/usr && chmod 0 a", 20
            )
            await sandbox.empty("/task/a")
            await sandbox.empty("/task/new")
            assert (await sandbox.run("ls -A a | wc -l; ls /usr | wc -l", 20)).stdout.split()[0] == "0"

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/etc/passwd", "/task/../etc/passwd", "work/x", "/proc/1/mem", "/workx", ""])
def test_paths_outside_are_refused(path: str) -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            with pytest.raises(SandboxError, match="none of the sandbox's folders"):
                await sandbox.get(path)
            with pytest.raises(SandboxError, match="none of the sandbox's folders"):
                await sandbox.put([PlacedFile(path=path, content=b"")])

    asyncio.run(go())


def test_links_are_not_followed() -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            await sandbox.run("ln -s /etc/passwd l; ln -s /usr d; ln -s /tmp t; mkfifo p; ln -s /tmp/o o; mkdir e", 20)
            for path in ("/task/l", "/task/d/bin/env", "/task/t/x", "/task/p", "/task/e"):
                with pytest.raises(SandboxError):
                    await sandbox.get(path)
            with pytest.raises(SandboxError):
                await sandbox.put([PlacedFile(path="/task/t/x", content=b"x")])
            with pytest.raises(SandboxError):
                await sandbox.get("/task/l", 5)
            await sandbox.put([PlacedFile(path="/task/o", content=b"x"), PlacedFile(path="/task/p", content=b"y")])
            assert (await sandbox.run("cat o p; ls /tmp", 20)).stdout == "xy"
            with pytest.raises(SandboxError):
                await sandbox.empty("/task/t")

    asyncio.run(go())


def test_a_phase_starts_without_what_the_last_one_left_running() -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            await sandbox.run("(sleep 0.5; echo late > /task/late) & ls() { echo mine; }; export LD_X=1; cd /tmp", 20)
            await sandbox.begin_phase(Limits(num_processes=30), env=[("B", "c")])
            seen = await sandbox.run("sleep 0.7; ls; pwd; echo $LD_X$B; ulimit -u", 20)
            assert seen.stdout.split() == ["/task", "c", "30"]

    asyncio.run(go())


def test_a_cancelled_command_is_ended_and_the_sandbox_goes_on() -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sandbox.run("sleep 300; echo late", 400)
            (bwrap,) = live()
            async with asyncio.timeout(20):
                while any(runs_sleep(pid) for pid in inside(bwrap)):  # nobody has to ask for anything
                    await asyncio.sleep(0.05)
            assert (await sandbox.run("echo well", 20)).stdout == "well\n"

    asyncio.run(go())


def test_closing_while_a_command_runs_ends_all_of_it() -> None:
    async def go() -> None:
        sandbox = Sandbox(SandboxSpec())
        await sandbox.open()
        (bwrap,) = live()
        running = asyncio.create_task(sandbox.run("setsid sleep 300 & (trap '' TERM INT HUP; sleep 301)", 400))
        while sum(map(runs_sleep, pids := inside(bwrap))) < 2:
            await asyncio.sleep(0.05)
        await sandbox.close()
        await sandbox.close()
        assert not exist(pids)
        with pytest.raises(SandboxError, match="closed"):
            await running
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.run("true", 1)

    asyncio.run(go())


def test_killing_the_owner_ends_the_sandbox() -> None:
    code = (
        "import asyncio\nfrom fathom.envs.sandbox import Sandbox, SandboxSpec\nasync def go():\n"
        "    async with Sandbox(SandboxSpec()) as s:\n        await s.run('sleep 300 & setsid sleep 301 &', 20)\n"
        "        print('ready', flush=True)\n        await s.run('sleep 302', 400)\nasyncio.run(go())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        pids = inside(owner.pid) - {owner.pid}
        assert len(pids) >= 4
        owner.kill()

    async def all_gone() -> None:
        async with asyncio.timeout(30):
            while exist(pids):
                await asyncio.sleep(0.02)

    asyncio.run(all_gone())


def test_a_sandbox_whose_first_process_is_killed_says_so() -> None:
    async def go() -> None:
        async with Sandbox(SandboxSpec()) as sandbox:
            (bwrap,) = live()
            (first,) = [pid for pid in inside(bwrap) - {bwrap}]
            os.kill(first, signal.SIGKILL)
            with pytest.raises(SandboxError, match="its first process ended"):
                await sandbox.run("true", 20)

    asyncio.run(go())


@pytest.mark.slow
def test_a_sandbox_that_hangs_is_closed_all_the_same() -> None:
    async def go() -> None:
        sandbox = Sandbox(SandboxSpec())
        await sandbox.open()
        await sandbox.run("sleep 300 &", 20)
        (bwrap,) = live()
        pids = inside(bwrap)
        (first,) = [pid for pid in pids if str(bwrap) in Path(f"/proc/{pid}/stat").read_text().split()[3]]
        os.kill(first, signal.SIGSTOP)
        await sandbox.close()
        async with asyncio.timeout(30):
            while exist(pids):
                await asyncio.sleep(0.02)

    asyncio.run(go())


def test_a_shell_may_close_what_it_prints_to() -> None:
    first, second, third = ran("exec >&- 2>&-", "echo lost; touch here", "exit 0")
    assert (first.exit_code, second.stdout, third.ended) == (0, "", Ended.SHELL_ENDED)


def test_many_at_once() -> None:
    async def one(number: int) -> str:
        async with Sandbox(SandboxSpec()) as sandbox:
            return (await sandbox.run(f"echo {number} > n; cat n; ls", 20)).stdout

    async def go() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(go()) == [f"{number}\nn\n" for number in range(8)]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="writable"):
        SandboxSpec(writable=("/usr",), workdir="/usr")
    with pytest.raises(ConfigError, match="workdir"):
        SandboxSpec(workdir="/elsewhere")
    with pytest.raises(ConfigError, match="num_processes"):
        Limits(num_processes=0)
    with pytest.raises(SandboxError, match="NUL"):
        ran("echo \0")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        ran("true")
