"""Tasks in worlds that Harbor's providers make: the same episodes, deadlines for every call, and refusals by name."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from boxed import SandboxBox
from harbor_folders import DOCKERFILE, TASK_TOML, make_task

from fathom.apps.cli.tasks.group import check
from fathom.core.errors import ConfigError, SandboxError
from fathom.core.ports.agent import Acting, Endpoint, Transcript
from fathom.core.records.trajectory import Graded
from fathom.envs.harbor import HarborEnvironment, HarborOptions, HarborTask, read_task
from fathom.envs.harbor.actors import Actor, nobody, oracle
from fathom.envs.harbor.episode import HarborEpisode
from fathom.envs.harbor.places import Place
from fathom.envs.harbor.places.provider import installed, require_harbor
from fathom.envs.harbor.places.provider_place import ProviderPlace
from fathom.envs.harbor.verifier import VerifierError
from fathom.envs.sandbox import Ended, Ran

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
NO_MODEL = Endpoint(base_url="http://127.0.0.1:9", key="none", model="none")
DONE = Transcript(messages=(), finish_reasons=(), acting=Acting.ENDED, detail="")
BUILT = DOCKERFILE + "RUN apt-get update\n"


def task_of(folder: Path, **parts: str) -> HarborTask:
    """Of an image that only a provider can build."""
    return read_task(make_task(folder, **{"dockerfile": BUILT, **parts}), local=False)


def box_of(task: HarborTask, **faults: tuple[str, ...]) -> SandboxBox:
    return SandboxBox(files=task.folder / "environment" / "data", **faults)


def place_of(task: HarborTask, box: SandboxBox, **options: float) -> ProviderPlace:
    return ProviderPlace(task, lambda *_: box, 200, **options)


async def attempt(task: HarborTask, actor: Actor, box: SandboxBox) -> Graded:
    episode = HarborEpisode(task, place_of(task, box), actor)
    try:
        await episode.boot()
        await episode.act(NO_MODEL)
        return await episode.grade(DONE)
    finally:
        await episode.close()


def commands(*said: str, told: list[Ran] | None = None, timeout_s: float = 20.0) -> Actor:
    async def act(task: HarborTask, place: Place, endpoint: Endpoint) -> None:
        for command in said:
            ran = await place.run(command, timeout_s)
            if told is not None:
                told.append(ran)

    return act


def scratch() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("fathom-harbor-*"))


@needs_bwrap
@pytest.mark.parametrize(("actor", "reward"), [(oracle, 1.0), (nobody, 0.0)])
def test_a_task_whose_image_a_provider_builds_is_graded_as_any(tmp_path: Path, actor: Actor, reward: float) -> None:
    task, before = task_of(tmp_path), scratch()
    box = box_of(task)
    graded = asyncio.run(attempt(task, actor, box))
    assert (graded.total, graded.grader) == (reward, "harbor/1")
    assert (box.asked[0], box.asked[-1]) == ("start", "stop")
    assert box.asked.count("stop") == 1
    assert scratch() == before


@needs_bwrap
def test_commands_start_anew_and_are_told_how_they_ended(tmp_path: Path) -> None:
    told: list[Ran] = []
    said = ["cd sub; X=1; pwd", "pwd; echo $X", "echo no >&2; exit 3", "seq 1000"]
    task = task_of(tmp_path)
    asyncio.run(attempt(task, commands(*said, told=told), box_of(task)))
    moved, anew, bad, long = told
    assert (moved.stdout, anew.stdout) == ("/app/sub\n", "/app\n\n")
    assert (bad.exit_code, bad.ended, bad.stderr) == (3, Ended.EXITED, "no\n")
    assert long.truncated
    assert long.stdout.startswith("1\n2\n")
    assert long.stdout.endswith("999\n1000\n")
    assert "3693 bytes left out" in long.stdout


@needs_bwrap
def test_a_command_that_takes_too_long_is_ended_where_it_runs(tmp_path: Path) -> None:
    told: list[Ran] = []
    said = ["sleep 300", "pgrep -f 'sleep 30[0]' || echo gone"]
    task, began_s = task_of(tmp_path), time.monotonic()
    asyncio.run(attempt(task, commands(*said, told=told, timeout_s=2.0), box_of(task)))
    assert time.monotonic() - began_s < 60
    assert (told[0].ended, told[0].exit_code) == (Ended.TIMEOUT, None)
    assert (told[1].ended, told[1].stdout) == (Ended.EXITED, "gone\n")


@needs_bwrap
@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("exit 1\n", r"left no reward \(exit code 1\)"),
        ("echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt\n", "left no reward"),
        ("echo nan > /logs/verifier/reward.txt\n", "not a finite number"),
        ("sleep 300\n", r"ended by a limit \(timeout\)"),
    ],
)
def test_what_is_no_clear_reward_is_an_error(tmp_path: Path, test: str, wrong: str) -> None:
    task = task_of(tmp_path, test=test, toml=TASK_TOML.replace("timeout_sec = 20", "timeout_sec = 2"))
    with pytest.raises(VerifierError, match=wrong):
        asyncio.run(attempt(task, nobody, box_of(task)))


@needs_bwrap
def test_tests_get_their_variables_and_the_agent_s_rewards_are_removed(tmp_path: Path) -> None:
    test = 'cat /logs/verifier/* > /app/found 2>&1; [ "$WHO-$PYTHONNOUSERSITE" = "me-1" ]; r=$((1-$?))\n'
    test += '[ "$(cat /app/found | grep -c 9)" = 0 ] || r=5\n'
    test += 'echo "{\\"a\\": $r, \\"b\\": 0.5}" > /logs/verifier/reward.json\n'
    task = task_of(tmp_path, test=test, toml=TASK_TOML + 'env = { WHO = "me" }\n')
    cheat = commands("mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.txt; echo 9 > /logs/verifier/reward.json")
    assert asyncio.run(attempt(task, cheat, box_of(task))).components == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize("call", ["start", "run_healthcheck"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
@needs_bwrap
def test_what_does_not_start_is_stopped_all_the_same(tmp_path: Path, call: str, how: str) -> None:
    build_s = 3 if how == "hangs" else 60
    toml = TASK_TOML + f"[environment]\nbuild_timeout_sec = {build_s}\n"
    task, before = task_of(tmp_path, toml=toml), scratch()
    box = box_of(task, **{how: (call,)})
    why = f"no {call}" if how == "fails" else "within 3 s"
    with pytest.raises(SandboxError, match=why):
        asyncio.run(attempt(task, nobody, box))
    assert box.asked[-1] == "stop"
    assert scratch() == before


@needs_bwrap
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_what_does_not_stop_is_told_in_time(tmp_path: Path, how: str) -> None:
    task, before = task_of(tmp_path), scratch()
    box = box_of(task, **{how: ("stop",)})

    async def scenario() -> None:
        place = place_of(task, box, stop_s=0.5)
        await place.open()
        with pytest.raises(SandboxError, match="did not stop"):
            await place.close()
        await place.close()

    asyncio.run(scenario())
    assert scratch() == before


@pytest.mark.parametrize("call", ["exec", "upload_dir", "empty_dirs"])
@needs_bwrap
def test_a_provider_that_fails_later_gives_no_reward(tmp_path: Path, call: str) -> None:
    task = task_of(tmp_path)
    box = box_of(task)

    async def scenario() -> None:
        episode = HarborEpisode(task, place_of(task, box), nobody)
        await episode.boot()
        await episode.act(NO_MODEL)
        box.fails = (call,)
        with pytest.raises(SandboxError, match=f"no {call}"):
            await episode.grade(DONE)
        await episode.close()

    asyncio.run(scenario())
    assert box.asked[-1] == "stop"


def test_a_task_that_a_provider_refuses_is_named(tmp_path: Path) -> None:
    def make(task: HarborTask, folder: Path) -> SandboxBox:
        raise RuntimeError("no GPUs here")

    async def scenario() -> None:
        place = ProviderPlace(task_of(tmp_path), make, 200)
        with pytest.raises(SandboxError, match="refuses five: RuntimeError: no GPUs here"):
            await place.open()
        await place.close()

    asyncio.run(scenario())


OF_IMAGES = "docker_image = 'x'\ngpus = 1\nallow_internet = true\n[environment.healthcheck]\ncommand = 'true'\n"


def test_what_needs_an_image_is_read_for_a_provider_and_refused_for_the_local_sandbox(tmp_path: Path) -> None:
    folder = make_task(tmp_path, toml=f"{TASK_TOML}[environment]\n{OF_IMAGES}", dockerfile=BUILT)
    assert read_task(folder, local=False).file.environment.gpus == 1
    with pytest.raises(ConfigError, match="docker_image = 'x'; gpus = 1; allow_internet = true; healthcheck"):
        read_task(folder)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[environment]\nos = 'windows'\n", "os = 'windows'"),
        ("[environment]\nmcp_servers = [1]\n", "mcp_servers"),
        ("[environment]\nskills_dir = '/s'\n", "skills_dir"),
        ("[environment.env]\nA = '${B}'\n", "environment.env.A takes a variable of the host"),
        ("[[steps]]\nname = 'a'\n", "`steps` cannot be honoured by Fathom"),
    ],
)
def test_what_only_harbor_itself_can_do_is_refused_in_either_case(tmp_path: Path, toml: str, named: str) -> None:
    folder = make_task(tmp_path, toml=TASK_TOML + toml)
    with pytest.raises(ConfigError, match=named):
        read_task(folder, local=False)


@pytest.mark.parametrize(
    ("python", "release", "words"),
    [
        ((3, 11), "0.25.0", r"Harbor needs Python 3\.12 or newer \(this is 3\.11\).*pip install 'harbor==0\.25\.\*'"),
        ((3, 12), None, r"needs the package 'harbor', which is not installed; run: pip install 'harbor==0\.25\.\*'"),
        ((3, 13), "0.26.1", r"harbor 0\.26\.1 is installed, and 0\.25 is needed; run: pip install"),
    ],
)
def test_without_harbor_its_providers_are_refused_with_what_to_do(
    python: tuple[int, int], release: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"task\.options\.provider = 'docker'.*{words}"):
        require_harbor("docker", python, release)
    require_harbor("docker", (3, 12), "0.25.3")


def options_of(folder: Path, **options: object) -> Callable[[], HarborEnvironment]:
    given = {"folders": (str(make_task(folder)),), **options}
    return lambda: HarborEnvironment(HarborOptions.model_validate(given))


@pytest.mark.skipif(sys.version_info >= (3, 12) and installed() is not None, reason="Harbor can be used here")
def test_an_environment_that_asks_for_a_provider_says_so_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.provider = 'modal' needs"):
        options_of(tmp_path, provider="modal")()


def test_options_of_one_kind_of_place_are_refused_for_the_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory_mb, storage_mb bounds the local sandbox"):
        options_of(tmp_path / "a", provider="docker", memory_mb=9, storage_mb=9)()
    with pytest.raises(ConfigError, match=r"provider_options \(a\) are of Harbor's providers"):
        options_of(tmp_path / "b", provider_options={"a": 1})()


@pytest.mark.skipif(sys.version_info >= (3, 12) and installed() is not None, reason="Harbor can be used here")
def test_the_check_of_folders_asks_for_harbor_only_where_a_provider_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.provider = 'podman' needs"):
        check([make_task(tmp_path)], provider="podman")
    with pytest.raises(ConfigError, match=r"provider_options \(a\) are of Harbor's providers"):
        check([make_task(tmp_path)], provider_option=["a=1"])
