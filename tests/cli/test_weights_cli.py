"""`fathom weights`: what can be rebuilt is, to the bit; everything else is refused before anything is written."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.apps.cli.weights.ago import ago
from fathom.core.errors import ConfigError, FathomError
from fathom.core.ids import EngineId
from fathom.ledger.events import Published
from fathom.ledger.reader import LedgerReader
from fathom.model.language_model import LanguageModel
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.run.history.folder import RunFolder
from fathom.sync.chain.store import Store
from fathom.sync.digest import digest
from fathom.sync.follow.version_folder import version_in
from fathom.text.tokenizer import Tokenizer
from synthetic.chain import ChainTrainer, write_run_with_chain

RUN = "resumed-20250101-120000"
COMMAND = [sys.executable, "-c", "from fathom.apps.cli.main import main; main()"]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    write_run_with_chain(runs_dir / RUN)
    return runs_dir


@pytest.fixture
def run(runs_dir: Path, tmp_path: Path) -> Path:
    """One that may be spoilt."""
    return Path(shutil.copytree(runs_dir / RUN, tmp_path / RUN))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["weights", *map(str, arguments)], env={"COLUMNS": "160"})


def refusal(*arguments: object) -> str:
    """What the user is told; the command ends with exit code 2 and prints nothing else."""
    done = call(*arguments)
    assert isinstance(done.exception, ConfigError), (done.output, done.exception)
    assert not done.output
    return str(done.exception)


def published(run: Path) -> dict[str, str]:
    with LedgerReader(run / "ledger") as reader:
        versions = [entry.event.version for entry in reader.events(Published, include_undone=True)]
    return {version.name: version.digest for version in versions}


def served(folder: Path) -> str:
    return digest(LanguageModel.load(folder, torch.float32, "cpu").weights())


# List ----


def test_it_lists_what_stands_and_how_it_lies_in_the_chain(runs_dir: Path) -> None:
    for spelled in ([RUN], ["show", RUN], ["resumed"]):
        done = call(*spelled, "--runs-dir", runs_dir)
        assert done.exit_code == 0, done.exception
        assert "delta and anchor" in done.output
        assert "8 versions" in done.output
    listed = json.loads(call(runs_dir / RUN, "--json").output)
    assert [each["name"] for each in listed] == ["v0@1", "v1@1", "v2@1", "v3@1", "v3@2", "v4@2", "v5@2", "v6@2"]
    assert [each["behind"] for each in listed] == [6, 5, 4, 3, 3, 2, 1, 0]
    assert listed[0]["kinds"] == ["anchor"]
    assert listed[0]["size_bytes"] > 100 * listed[1]["size_bytes"]
    known = published(runs_dir / RUN)
    assert all(each["digest"] == known[each["name"]] for each in listed)
    assert {"v4@1", "v5@1", "v9@2"} & set(known) == {"v4@1", "v5@1"}


def test_versions_behind_a_lost_anchor_are_not_promised(run: Path) -> None:
    (run / "chain" / "links" / "v0@1.anchor.msgpack").unlink()
    names = [each["name"] for each in json.loads(call(run, "--json").output)]
    assert names == ["v3@2", "v4@2", "v5@2", "v6@2"], "the first version of an incarnation is an anchor"


def test_a_run_without_versions_says_so(run: Path) -> None:
    shutil.rmtree(run / "chain")
    done = call(run)
    assert done.exit_code == 0
    assert "no version that can be rebuilt" in done.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s ago"), (119, "119 s ago"), (121, "2 min ago"), (1e6, "12 d ago")]
)
def test_ages_are_told_in_units_that_fit(seconds: float, text: str) -> None:
    assert ago(seconds) == text


# Rebuild ----


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--version", 0], "v0@1"),
        (["--version", -6], "v0@1"),
        (["--version", 3], "v3@2"),
        (["--version", 3, "--incarnation", 1], "v3@1"),
        (["--version", 6], "v6@2"),
    ],
)
def test_a_version_comes_back_to_the_bit_for_us_and_for_others(
    runs_dir: Path, tmp_path: Path, options: list[object], name: str
) -> None:
    out = tmp_path / "out" / "model"
    done = call(*options, "--out", out, runs_dir / RUN)
    assert done.exit_code == 0, done.exception
    assert name in done.output
    version = version_in(out)
    assert version is not None
    assert version.name == name
    assert served(out) == version.digest == published(runs_dir / RUN)[name]
    theirs = AutoModelForCausalLM.from_pretrained(out)
    ours = LanguageModel.load(out, torch.float32, "cpu").weights()
    assert torch.equal(theirs.lm_head.weight, ours["model.embed_tokens.weight"]), "tied"
    assert Tokenizer.load(out).digest == Tokenizer.load(runs_dir / RUN / "model").digest
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--version", 4, "--incarnation", 1], "v4@1 was undone by a resume"),
        (["--version", 7], "v7 cannot be rebuilt; there are v0@1, v1@1, v2@1, v3@1, v3@2, v4@2, v5@2, v6@2"),
        (["--version", 9], "v9 cannot be rebuilt"),
        (["--version", -7], "v-1 (-7 from v6) cannot be rebuilt"),
        (["--version", 3, "--incarnation", 5], "v3@5 cannot be rebuilt"),
        (["--version", 10**9], "v1000000000 cannot be rebuilt"),
    ],
)
def test_what_is_not_there_or_was_undone_is_refused_and_what_is_is_named(
    runs_dir: Path, tmp_path: Path, options: list[object], says: str
) -> None:
    assert says in refusal(runs_dir / RUN, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_a_run_that_goes_on_a_version_is_held_while_it_is_read(run: Path, tmp_path: Path) -> None:
    folder = RunFolder(run)
    folder.lock()
    try:
        assert call(run, "--version", 2, "--out", tmp_path / "out").exit_code == 0
    finally:
        folder.unlock()
    assert (run / "chain" / "leases").is_dir(), "there was one"
    assert not Store.of_run(run, None).list("leases")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--version", 3], "belong together"),
        (["--out", "somewhere"], "belong together"),
        (["--incarnation", 2], "give --version N too"),
    ],
)
def test_half_a_request_is_refused(runs_dir: Path, options: list[object], says: str) -> None:
    assert says in refusal(runs_dir / RUN, *options)


@pytest.mark.parametrize("arguments", [["--version", "three", "x"], ["--version"], ["x", "y"], ["--nosuch", "x"]])
def test_nonsense_is_bad_input(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_nothing_is_overwritten(runs_dir: Path, tmp_path: Path) -> None:
    for there in (tmp_path / "file", tmp_path / "folder"):
        if there.name == "file":
            there.write_text("mine")
        else:
            there.mkdir()
        assert "is not overwritten" in refusal(runs_dir / RUN, "--version", 1, "--out", there)
    assert (tmp_path / "file").read_text() == "mine"


def test_unknown_runs_and_runs_without_a_chain_are_refused(runs_dir: Path, run: Path, tmp_path: Path) -> None:
    assert "did you mean" in refusal("resumd", "--runs-dir", runs_dir)
    assert "no run" in refusal("x", "--runs-dir", tmp_path / "nowhere")
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"sync": {"chain": {"budget_mb": 0}}}))
    assert "keeps no versions" in refusal(run)


def failure(*arguments: object) -> str:
    """Something is wrong that is not the user's input: exit code 1."""
    done = call(*arguments)
    assert isinstance(done.exception, FathomError)
    assert not isinstance(done.exception, ConfigError)
    return str(done.exception)


def test_a_flipped_byte_is_found_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    data = run / "chain" / "data" / "v2@1.delta.bin"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "model.norm.weight" in failure(run, "--version", 2, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert call(run, "--version", 1, "--out", tmp_path / "out").exit_code == 0


def test_a_chain_of_another_run_is_found_by_the_ledger(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "chain")
    other = ChainTrainer(tmp_path / "start", Store.of_run(run, None))
    other.weights["model.norm.weight"].mul_(3)
    other.publish(0)
    said = failure(run, "--version", 0, "--out", tmp_path / "out")
    assert "was published: this chain is not this run's" in said
    assert not (tmp_path / "out").exists()


# Follow ----


def wait_for(what, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_process_follows_into_a_folder_until_it_is_asked_to_end(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "chain")
    trainer = ChainTrainer(tmp_path / "start", store)
    served_at = tmp_path / "served"
    versions = [trainer.publish(0)]
    command = [*COMMAND, "weights", "follow", str(tmp_path / "chain"), "--into", str(served_at), "--name", "puller"]
    puller = subprocess.Popen([*command, "--look-s", "0.05"], stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: version_in(served_at / "current") == versions[0])
        for number in range(1, 4):
            versions.append(trainer.publish(number))
            wait_for(lambda: version_in(served_at / "current") == versions[-1])
        assert served(served_at / "current") == versions[-1].digest
        wait_for(lambda: "v3@1" in call("followers", tmp_path / "chain").output)
        puller.send_signal(signal.SIGTERM)
        said, _ = puller.communicate(timeout=30)
    finally:
        puller.kill()
    assert puller.returncode == 0
    assert [line.split()[2] for line in said.splitlines()] == [version.name for version in versions]
    trainer.publish(4)
    (listed,) = json.loads(call("followers", tmp_path / "chain", "--json").output)
    assert (listed["report"]["name"], listed["report"]["following"], listed["behind"]) == ("puller", False, 1)
    assert listed["report"]["version"]["digest"] == versions[-1].digest
    assert "ended" in call("followers", tmp_path / "chain").output
    assert {path.name for path in served_at.iterdir()} == {".lock", "current", "v2@1", "v3@1"}


def test_an_engine_that_runs_elsewhere_is_given_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ChainTrainer(tmp_path / "start", Store.open(tmp_path / "chain"))
    spec = EmbeddedSpec(
        engine=EngineId("theirs"),
        model_folder=tmp_path / "start",
        log_path=tmp_path / "engine.log",
        max_context_tokens=64,
    )
    monkeypatch.setenv("THEIR_TOKEN", spec.token)
    with asyncio.Runner() as runner:
        engine = runner.run(EmbeddedEngine.launch(spec))
        try:
            assert engine.process is not None
            follow = ("follow", tmp_path / "chain", "--engine", engine.process.url, "--once", "--token-env")
            for number in range(2):
                version = trainer.publish(number)
                done = call(*follow, "THEIR_TOKEN")
                assert done.exit_code == 0, done.output
                assert runner.run(engine.status()).version == version
            assert "token is missing or wrong" in failure(*follow, "PATH")
        finally:
            runner.run(engine.close())
    (listed,) = json.loads(call("followers", tmp_path / "chain", "--json").output)
    assert listed["report"]["version"]["digest"] == version.digest
    assert listed["report"]["moved_bytes"] < 10_000, "the second was read as what had changed"
    assert listed["behind"] == 0


def test_once_says_by_its_exit_code_whether_it_serves_the_newest(tmp_path: Path) -> None:
    trainer = ChainTrainer(tmp_path / "start", Store.open(tmp_path / "chain"))
    follow = ("follow", tmp_path / "chain", "--into", tmp_path / "served", "--once", "--name", "f")
    (tmp_path / "chain" / "links").mkdir(exist_ok=True)
    done = call(*follow)
    assert done.exit_code == 0
    assert "the chain is empty" in done.output
    trainer.publish(0)
    assert call(*follow).exit_code == 0
    (listed,) = json.loads(call("followers", tmp_path / "chain", "--json").output)
    assert not listed["report"]["following"], "it ended, and is listed as one that follows"
    trainer.publish(1)
    (tmp_path / "chain" / "data" / "v1@1.delta.bin").unlink()
    done = call(*follow)
    assert done.exit_code == 1
    assert "v1@1.delta.bin is missing" in done.output
    listed = call("followers", tmp_path / "chain").output
    assert "v1@1.delta.bin is missing" in " ".join(listed.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "either --into DIR, or --engine URL"),
        (["--into", "x", "--engine", "http://localhost:1", "--token-env", "PATH"], "either --into DIR, or --engine"),
        (["--engine", "http://localhost:1"], "belong together"),
        (["--into", "x", "--token-env", "PATH"], "belong together"),
        (["--engine", "http://localhost:1", "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--engine", "nonsense", "--token-env", "PATH"], "no URL of an engine"),
        (["--into", "x", "--name", "../x"], "no name of a follower"),
    ],
)
def test_half_a_wish_to_follow_is_refused(runs_dir: Path, options: list[str], says: str) -> None:
    assert says in refusal("follow", runs_dir / RUN, *options)


@pytest.mark.parametrize("command", [["followers"], ["follow", "--into", "x"]])
@pytest.mark.parametrize("place", ["nosuch", "nosuch://bucket/x", ""])
def test_a_place_that_is_no_chain_is_refused(command: list[str], place: str, tmp_path: Path) -> None:
    refusal(*command, place, "--runs-dir", tmp_path)


def test_followers_of_a_run_that_nobody_follows(runs_dir: Path) -> None:
    done = call("followers", RUN, "--runs-dir", runs_dir)
    assert done.exit_code == 0
    assert "nobody follows" in done.output
