"""Harbor's task folders: what is read, what is refused by name, and where rewards come from."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path

import pytest
from harbor_folders import DOCKERFILE, TASK_TOML, make_task
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import ConfigError, DataError, FathomError
from fathom.core.ports.agent import AgentEnvironment, Endpoint
from fathom.envs.harbor import HarborEnvironment, HarborOptions, HarborTask, read_task
from fathom.envs.harbor.admission import check_folders, reward_of
from fathom.envs.harbor.verifier import VerifierError, json_reward, text_reward
from fathom.envs.sandbox import Sandbox

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def scripted(*commands: str, timeout_s: float = 20.0) -> object:
    async def act(task: HarborTask, sandbox: Sandbox, endpoint: Endpoint) -> None:
        for command in commands:
            await sandbox.run(command, timeout_s)

    return act


def reward(folder: Path, *commands: str) -> float:
    return asyncio.run(reward_of(read_task(folder), scripted(*commands)))  # type: ignore[arg-type]


@needs_bwrap
def test_solution_gets_1_and_nothing_gets_0(tmp_path: Path) -> None:
    make_task(tmp_path)
    make_task(tmp_path, "bad-solution", solve="echo 4 > out\n")
    make_task(tmp_path, "too-easy", test="echo 1 > /logs/verifier/reward.txt\n")
    make_task(tmp_path, "silent", test="exit 1\n")
    make_task(tmp_path, "needs-gpu", toml=TASK_TOML + "[environment]\ngpus = 1\n")
    found = {row.name: row for row in asyncio.run(check_folders(sorted(tmp_path.iterdir())))}
    assert (found["five"].oracle, found["five"].no_op, found["five"].admitted) == (1.0, 0.0, True)
    assert "gets 0, not 1" in found["bad-solution"].reason
    assert "doing nothing gets 1" in found["too-easy"].reason
    assert "left no reward (exit code 1)" in found["silent"].reason
    assert found["silent"].oracle is None
    assert "gpus = 1" in found["needs-gpu"].reason
    assert [name for name, row in found.items() if row.admitted] == ["five"]


@needs_bwrap
def test_the_agent_sees_its_files_and_neither_tests_nor_solution(tmp_path: Path) -> None:
    folder = make_task(
        tmp_path, test="cp /app/seen /logs/verifier/reward.txt; ls /solution | wc -l > /logs/verifier/n\n"
    )
    find = "find /app /tests /solution /logs /tmp /root -name test.sh -o -name solve.sh | wc -l"
    seen = f"cat sub/deep; echo $A; pwd; {find}; ls -A /tests /solution"
    want = "deep\nb\n/app\n0\n/solution:\n\n/tests:"
    assert reward(folder, f'[ "$({seen})" = "{want}" ] && echo 1 > seen || echo 0 > seen') == 1.0


@needs_bwrap
def test_what_the_agent_left_running_or_lying_cannot_make_the_reward(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    assert (
        reward(
            folder,
            "mkdir /logs/verifier; cd /logs/verifier; echo '{\"r\": 1}' > reward.json; echo 1 > reward.txt; cd /app",
            "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 000 /tests/test.sh /tests",
            "(cd /logs; while :; do echo 1 > verifier/reward.txt; echo '{\"r\": 1}' > verifier/reward.json; done) &",
            "cat() { echo 5; }; export -f cat; export BASH_ENV=/app/evil; echo 'echo 5 > out' > evil; alias cat=echo",
        )
        == 0.0
    )
    assert reward(folder, "rm -rf /logs/*; ln -s /app /logs/verifier; echo 1 > reward.txt; exit 1") == 0.0
    assert reward(folder, "chmod 000 /logs /tests /app; chmod 755 /app; echo 5 > /app/out") == 1.0


@needs_bwrap
@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("true", "left no reward"),
        (": > /logs/verifier/reward.txt", "not a number"),
        ("echo nan > /logs/verifier/reward.txt", "finite"),
        ("echo well > /logs/verifier/reward.txt", "'well'"),
        ("echo 1 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/reward.json", "not an object of numbers"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "ended by a limit"),
        ("mkdir /logs/verifier/reward.json", "not a plain file"),
        ("ln -s /app/in /logs/verifier/reward.txt", "could not get"),
    ],
)
def test_what_is_no_reward_is_an_error(tmp_path: Path, test: str, says: str) -> None:
    folder = make_task(tmp_path, test=test + "\n", toml=TASK_TOML.replace("timeout_sec = 20", "timeout_sec = 1"))
    with pytest.raises((VerifierError, FathomError), match=says):
        reward(folder)


@needs_bwrap
def test_an_agent_that_ran_out_of_time_is_graded(tmp_path: Path) -> None:
    folder = make_task(tmp_path)

    async def slow(task: HarborTask, sandbox: Sandbox, endpoint: Endpoint) -> None:
        try:
            async with asyncio.timeout(0.5):
                await sandbox.run("wc -l < in > out; sleep 60; rm out", 100)
        except TimeoutError:
            pass

    assert asyncio.run(reward_of(read_task(folder), slow)) == 1.0


def test_json_wins_and_is_judged() -> None:
    assert json_reward(b'{"reward": 0.5, "speed": 3}') == {"reward": 0.5}
    assert json_reward(b'{"right": 1, "short": -0.25}') == {"right": 1.0, "short": -0.25}
    for bad in (
        b"",
        b"1",
        b"[1]",
        b"{}",
        b'{"a": true}',
        b'{"a": "1"}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xff",
        b"[" * 9999,
    ):
        with pytest.raises(VerifierError):
            json_reward(bad)
    with pytest.raises(VerifierError):
        json_reward(b'{"a": 1' + b"0" * 400 + b"}")


@given(st.binary(max_size=20))
def test_text_is_a_finite_number_or_an_error(content: bytes) -> None:
    try:
        value = text_reward(content)
    except VerifierError:
        return
    assert value == float(content.decode().strip())
    assert abs(value) < float("inf")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('docker_image = "x"', "docker_image = 'x'"),
        ("gpus = 2", "gpus = 2"),
        ('network_mode = "public"', "network_mode = 'public'"),
        ("allow_internet = true", "allow_internet"),
        ('skills_dir = "/s"', "skills_dir"),
        ('env = { A = "${HOME}" }', "environment.env.A"),
        ('workdir = "/etc"', "/etc"),
        ("memory = 3", "environment.memory"),
        ("memory_mb = -1", "environment.memory_mb"),
    ],
)
def test_what_a_task_file_asks_for_in_vain_is_named(tmp_path: Path, table: str, named: str) -> None:
    folder = make_task(tmp_path, toml=f"{TASK_TOML}[environment]\n{table}\n")
    with pytest.raises(ConfigError, match=named.replace("$", r"\$").replace("{", r"\{")):
        read_task(folder)


@pytest.mark.parametrize(
    ("table", "memory_mb", "storage_mb"),
    [
        ('memory = "2G"\nstorage = "10g"', 2048, 10240),
        ('memory = "512M"', 512, None),
        ('memory = "1.5G"\nmemory_mb = 1536\nstorage = "2048K"', 1536, 2),
    ],
)
def test_sizes_are_read_as_the_older_schema_wrote_them(
    tmp_path: Path, table: str, memory_mb: int, storage_mb: int | None
) -> None:
    folder = make_task(tmp_path, toml=TASK_TOML.replace("1.4", "1.0") + f"[environment]\n{table}\n")
    environment = read_task(folder).file.environment
    assert (environment.memory_mb, environment.storage_mb) == (memory_mb, storage_mb)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('memory = "much"', "environment.memory = 'much' is no size; write memory_mb"),
        ('storage = "0G"', "environment.storage_mb"),
        ('memory = "2G"\nmemory_mb = 2000', "environment.memory and environment.memory_mb contradict"),
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path: Path, table: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        read_task(make_task(tmp_path, toml=f"{TASK_TOML}[environment]\n{table}\n"))


@pytest.mark.parametrize(
    ("dockerfile", "line"),
    [
        (DOCKERFILE + "RUN apt-get update\n", "line 6: 'RUN apt-get update'"),
        (DOCKERFILE + "\n\nUSER x\n", "line 8"),
        ("FROM nginx\nWORKDIR /app\n", "line 1"),
        (DOCKERFILE + "FROM debian\n", "line 6"),
        (DOCKERFILE + "COPY --from=x a /app\n", "line 6"),
        (DOCKERFILE + "COPY ../x /app\n", "line 6"),
        (DOCKERFILE + "COPY data/* /app/\n", "line 6"),
        (DOCKERFILE + "COPY nothing /app\n", "nothing"),
        (DOCKERFILE + "WORKDIR $X\n", "line 6"),
        (DOCKERFILE + "COPY data /usr/x\n", "/usr"),
        ("WORKDIR /app\n", "FROM comes first"),
        ("FROM debian\n", "WORKDIR"),
    ],
)
def test_what_a_dockerfile_asks_for_in_vain_is_named_with_its_line(tmp_path: Path, dockerfile: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        read_task(make_task(tmp_path, dockerfile=dockerfile))


def test_copy_does_as_docker_does(tmp_path: Path) -> None:
    text = (
        "FROM ubuntu@sha256:00\nWORKDIR /app\nWORKDIR w\nENV A b c\nENV B=1 C='2 3'\nCOPY data/in data/sub/deep x/\n"
        'COPY data/in y\nCOPY data/in .\nCOPY ["data/sub", "/data/z"]\nCOPY data \\\n  # comment\n  /data\n'
    )
    layout = read_task(make_task(tmp_path, dockerfile=text)).layout
    assert layout.workdir == "/app/w"
    assert dict(layout.env) == {"A": "b c", "B": "1", "C": "2 3"}
    assert sorted(target for target, _ in layout.files) == [
        "/app/w/in", "/app/w/x/deep", "/app/w/x/in", "/app/w/y", "/data/in", "/data/sub/deep", "/data/z/deep",
    ]  # fmt: skip


def test_a_link_in_a_task_folder_is_refused(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    (folder / "environment" / "data" / "link").symlink_to("/etc/shadow")
    with pytest.raises(DataError, match="link"):
        read_task(folder)


@needs_bwrap
def test_tasks_are_held_out_by_name(tmp_path: Path) -> None:
    for name in ("a-1", "a-2", "b-1"):
        make_task(tmp_path / "x", name)
    make_task(tmp_path / "y", "c")
    make_task(tmp_path / "z", "c")
    made = HarborEnvironment(
        HarborOptions(folders=(str(tmp_path / "x"),), eval_folders=(str(tmp_path / "y" / "c"),), eval_ids=("a-*",))
    )
    environment = pickle.loads(pickle.dumps(made))
    assert isinstance(environment, AgentEnvironment)
    assert [task.id for task in environment.tasks()] == ["b-1"]
    assert [task.id for task in environment.eval_tasks()] == ["c", "a-1", "a-2"]
    assert environment.tasks()[0].messages[0]["content"] == "Count the lines of in."
    with pytest.raises(ConfigError, match="fits no task"):
        HarborEnvironment(HarborOptions(folders=(str(tmp_path / "x"),), eval_ids=("q*",)))
    with pytest.raises(ConfigError, match="two task folders are called 'c'"):
        HarborEnvironment(HarborOptions(folders=(str(tmp_path / "y"), str(tmp_path / "z"))))
    with pytest.raises(DataError, match="no folder"):
        HarborEnvironment(HarborOptions(folders=(str(tmp_path / "none"),)))
