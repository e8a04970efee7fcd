"""With Harbor installed: its factory, its base class and its task files, over the local sandbox."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from pathlib import Path

import pytest
from harbor_folders import DOCKERFILE, TASK_TOML, make_task

from fathom.core.errors import ConfigError, SandboxError
from fathom.envs.harbor import HarborEnvironment, HarborOptions
from fathom.envs.harbor.admission import check_folders
from fathom.envs.harbor.places.provider import Provider

pytest.importorskip("harbor.environments", reason="needs Harbor, and with it Python 3.12")
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

OWN = "own_box:OwnBox"
BUILT = DOCKERFILE + "RUN true\n"


def test_tasks_are_checked_where_harbor_makes_the_world(tmp_path: Path) -> None:
    make_task(tmp_path, dockerfile=BUILT, toml=TASK_TOML + "[environment.env]\nB = 'b'\n")
    make_task(tmp_path, "isolated", toml=TASK_TOML + "[environment]\nnetwork_mode = 'no-network'\n")
    isolated, five = sorted(
        asyncio.run(check_folders(sorted(tmp_path.iterdir()), Provider(OWN, {"note": "n"}))),
        key=lambda row: row.admitted,
    )
    assert (five.oracle, five.no_op, five.reason) == (1.0, 0.0, "")
    assert "network_mode='no-network' is not supported by own" in isolated.reason
    from own_box import OwnBox

    assert {made.note for made in OwnBox.made} == {"n"}
    assert {made.box.asked[-1] for made in OwnBox.made} == {"stop"}
    assert all(made.session_id.startswith("fathom-five-") for made in OwnBox.made)
    assert len({made.session_id for made in OwnBox.made}) == len(OwnBox.made)


def test_an_environment_of_fathom_s_takes_it_to_another_process(tmp_path: Path) -> None:
    folder = make_task(tmp_path, dockerfile=BUILT)
    options = HarborOptions(folders=(str(folder),), provider=OWN)
    environment = pickle.loads(pickle.dumps(HarborEnvironment(options)))

    async def scenario() -> None:
        episode = environment.episode(environment.tasks()[0])
        try:
            await episode.boot()
        finally:
            await episode.close()

    asyncio.run(scenario())


def test_a_task_that_harbor_s_class_refuses_is_named(tmp_path: Path) -> None:
    folder = make_task(tmp_path, toml=TASK_TOML + "[environment]\ngpus = 1\n")
    environment = HarborEnvironment(HarborOptions(folders=(str(folder),), provider=OWN))
    with pytest.raises(SandboxError, match="the provider refuses five: RuntimeError: Task requires 1 GPU"):
        asyncio.run(environment.episode(environment.tasks()[0]).boot())


def test_a_provider_that_harbor_does_not_know_and_options_that_come_from_the_task_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'dockr' is none of Harbor's: docker, "):
        Provider("dockr", {})
    with pytest.raises(ConfigError, match="session_id comes from the task"):
        Provider(OWN, {"session_id": "x"})
