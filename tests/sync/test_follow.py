"""Those who follow a chain serve its newest version, proven, or go on with the old one and say why."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from fathom.core.errors import ConfigError, DeliveryError, EngineError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import DigestKind, ReceivesInto
from fathom.model.language_model import LanguageModel
from fathom.sync.chain.links import LinkName
from fathom.sync.chain.store import Store
from fathom.sync.digest import digest
from fathom.sync.follow.folder_receiver import FolderReceiver
from fathom.sync.follow.follower import Follower
from fathom.sync.follow.model_files import model_files
from fathom.sync.follow.reports import FollowerReport, put_report, standings
from fathom.sync.follow.version_folder import version_in, write_version
from fathom.sync.memory_receiver import MemoryReceiver
from fathom.text.tokenizer import Tokenizer
from synthetic.chain import ChainTrainer


@pytest.fixture
def trainer(tmp_path: Path) -> ChainTrainer:
    return ChainTrainer(tmp_path / "start", Store.open(tmp_path / "chain"))


class World:
    """A follower that materialises into a folder."""

    def __init__(self, trainer: ChainTrainer, root: Path) -> None:
        self.root = root
        self.receiver = FolderReceiver(EngineId("f"), root, model_files(trainer.store))
        self.follower = Follower(trainer.store, self.receiver, "f", serving=self.receiver.version)

    def pull(self) -> FollowerReport:
        return asyncio.run(self.follower.pull())

    def folders(self) -> set[str]:
        return {path.name for path in self.root.iterdir() if path.name != ".lock"}

    def serves(self, version: PolicyVersion) -> None:
        """The folder behind `current` is whole, and is that version to the bit."""
        assert version_in(self.root / "current") == version
        assert (self.root / "current").resolve().name == version.name
        loaded = LanguageModel.load(self.root / "current", torch.float32, "cpu")
        assert digest(loaded.weights()) == version.digest


@pytest.fixture
def world(trainer: ChainTrainer, tmp_path: Path) -> Iterator[World]:
    made = World(trainer, tmp_path / "served")
    yield made
    made.receiver.close()


def flip_a_byte(store: Store, version: PolicyVersion, *, anchor: bool) -> bytes:
    """Returns the object as it was."""
    path = Path(store.url) / LinkName.of(version, anchor=anchor).data
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return content


def test_each_new_version_is_a_folder_and_the_last_two_stay(trainer: ChainTrainer, world: World) -> None:
    assert world.pull().wanted is None
    for number in range(4):
        version = trainer.publish(number)
        report = world.pull()
        assert (report.version, report.wanted, report.error) == (version, version, "")
        assert report.proven is DigestKind.MEMORY
        world.serves(version)
    assert world.folders() == {"v2@1", "v3@1", "current"}
    assert Tokenizer.load(world.root / "current").vocabulary
    assert report.moved_bytes < 10_000, "only what changed was read"
    (standing,) = standings(trainer.store)
    assert (standing.report.version, standing.behind) == (version, 0)
    trainer.publish(4)
    trainer.publish(5)
    assert standings(trainer.store)[0].behind == 2


def test_versions_are_skipped_and_a_later_incarnation_is_newer(trainer: ChainTrainer, world: World) -> None:
    for number in range(3):
        newest = trainer.publish(number)
    assert world.pull().version == newest
    trainer.parent = None
    resumed = trainer.publish(1, incarnation=2)
    trainer.publish(7)  # what an earlier incarnation made late is not newer
    assert standings(trainer.store)[0].behind is None
    assert world.pull().version == resumed
    world.serves(resumed)


def test_a_damaged_version_leaves_the_old_one_serving_and_is_reported(trainer: ChainTrainer, world: World) -> None:
    old = trainer.publish(0)
    world.pull()
    bad = trainer.publish(1)
    whole = flip_a_byte(trainer.store, bad, anchor=False)
    report = world.pull()
    assert (report.version, report.wanted) == (old, bad)
    assert "model.norm.weight" in report.error
    world.serves(old)
    (standing,) = standings(trainer.store)
    assert (standing.behind, standing.report.error) == (1, report.error)
    (Path(trainer.store.url) / LinkName.of(bad, anchor=False).data).write_bytes(whole)
    assert world.pull().error == ""
    world.serves(bad)


def test_a_lost_link_never_takes_a_follower_back(trainer: ChainTrainer, world: World) -> None:
    trainer.publish(0)
    version = trainer.publish(1)
    world.pull()
    link = Path(trainer.store.url) / LinkName.of(version, anchor=False).link
    link.write_bytes(link.read_bytes()[:-1])
    report = world.pull()
    assert "v1@1 serves, and the newest" in report.error
    assert report.version == version
    world.serves(version)
    newer = trainer.publish(2)
    assert world.pull().version == newer


def test_a_folder_in_the_way_leaves_the_old_one_serving(trainer: ChainTrainer, world: World) -> None:
    old = trainer.publish(0)
    world.pull()
    (world.root / "v1@1").mkdir()
    (world.root / "v1@1" / "mine.txt").write_text("precious")
    new = trainer.publish(1)
    report = world.pull()
    assert "is not overwritten" in report.error
    assert report.version == old
    world.serves(old)
    (world.root / "v1@1" / "mine.txt").unlink()
    (world.root / "v1@1").rmdir()
    assert world.pull().version == new
    world.serves(new)


def test_a_follower_that_starts_again_goes_on_from_its_folder(trainer: ChainTrainer, world: World) -> None:
    version = trainer.publish(0)
    world.pull()
    with pytest.raises(ConfigError, match="another process follows"):
        World(trainer, world.root)
    world.receiver.close()
    (world.root / ".unfinished-v1@1-killed").mkdir()
    (world.root / ".current-killed").symlink_to("v1@1")
    again = World(trainer, world.root)
    assert again.folders() == {"v0@1", "current"}
    before = os.stat(world.root / "v0@1" / "model.safetensors").st_mtime_ns
    report = again.pull()
    assert (report.version, report.moved_bytes, report.proven) == (version, 0, None)
    assert os.stat(world.root / "v0@1" / "model.safetensors").st_mtime_ns == before
    newer = trainer.publish(1)
    assert again.pull().version == newer
    again.serves(newer)
    again.receiver.close()


def test_versions_of_another_run_are_not_mixed_in(trainer: ChainTrainer, world: World, tmp_path: Path) -> None:
    ours = trainer.publish(0)
    world.pull()
    other = ChainTrainer(tmp_path / "other", Store.open(tmp_path / "other-chain"))
    other.weights["model.norm.weight"].mul_(2)
    other.publish(0)
    world.receiver.close()
    mixed = World(other, world.root)
    assert "is of another run" in mixed.pull().error
    mixed.receiver.close()
    world.serves(ours)


@pytest.mark.parametrize("what", ["file", "current"])
def test_a_folder_that_is_somebody_elses_is_refused(trainer: ChainTrainer, tmp_path: Path, what: str) -> None:
    root = tmp_path / "there"
    if what == "file":
        root.write_text("no folder")
    else:
        (root / "current").mkdir(parents=True)
    with pytest.raises(ConfigError):
        FolderReceiver(EngineId("f"), root, model_files(trainer.store))


def test_a_chain_that_describes_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model/config\.json"):
        model_files(Store.open(tmp_path / "empty"))


def test_what_is_there_is_never_overwritten_and_what_is_wrong_never_left(trainer: ChainTrainer, tmp_path: Path) -> None:
    version = trainer.publish(0)
    files = model_files(trainer.store)
    out = tmp_path / "a" / "out"
    write_version(files, version, trainer.weights, out)
    with pytest.raises(ConfigError, match="not overwritten"):
        write_version(files, version, trainer.weights, out)
    wrong = msgspec.structs.replace(version, digest="0" * 64)
    with pytest.raises(Exception, match="read back"):
        write_version(files, wrong, trainer.weights, tmp_path / "a" / "wrong")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DeliveryError, match="cannot write"):
        write_version(files, version, trainer.weights, tmp_path / "file" / "out")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"out"}


# An engine of another kind ------------------------------------------------------------------------------------------


class Sick:
    """A memory receiver that does one thing wrong."""

    def __init__(self, template: dict[str, Tensor], sick: str) -> None:
        self.inner = MemoryReceiver(EngineId("m"), template)
        self.sick = sick
        self.leases: list[int] = []
        self.store: Store | None = None

    @property
    def id(self):
        return self.inner.id

    @property
    def capabilities(self):
        return self.inner.capabilities

    async def stage(self, manifest, source):
        if self.store is not None:
            self.leases.append(len(self.store.list("leases")))
        if self.sick == "stage":
            raise EngineError("m", "cannot stage")
        if self.sick == "hangs":
            await asyncio.sleep(60)
        report = await self.inner.stage(manifest, source)
        if self.sick == "memory":
            self.inner.staging["model.norm.weight"][0] += 1
        return report

    async def verify(self):
        return await self.inner.verify()

    async def commit(self, version, mode):
        if self.sick == "commit":
            raise RuntimeError("an error of its own kind")
        return await self.inner.commit(version, mode)

    async def rollback(self):
        await self.inner.rollback()
        if self.sick == "commit":
            raise EngineError("m", "cannot roll back either")

    async def score(self, request):
        return await self.inner.score(request)


@pytest.mark.parametrize(
    ("sick", "says"),
    [
        ("stage", "cannot stage"),
        ("memory", "wrong tensors: ['model.norm.weight']"),
        ("commit", "an error of its own kind"),
        ("hangs", "not done within 2 s"),
    ],
)
def test_whatever_fails_the_old_version_serves_on(trainer: ChainTrainer, sick: str, says: str) -> None:
    engine = Sick(trainer.weights, "")
    engine.store = trainer.store

    async def run() -> None:
        follower = Follower(trainer.store, engine, "m", timeout_s=2.0 if sick == "hangs" else 60.0)
        old = trainer.publish(0)
        assert (await follower.pull()).version == old
        held = digest(engine.inner.weights)
        new, engine.sick = trainer.publish(1), sick
        report = await follower.pull()
        assert says in report.error
        assert (report.version, report.wanted) == (old, new)
        assert engine.inner.version == old
        assert digest(engine.inner.weights) == held == old.digest
        engine.sick = ""
        report = await follower.pull()
        assert (report.version, report.error) == (new, "")
        assert digest(engine.inner.weights) == new.digest
        assert set(engine.leases) == {1}, "while it reads it holds a lease"
        assert not trainer.store.list("leases")

    asyncio.run(run())


def test_an_engine_without_a_second_place_for_weights_cannot_follow(trainer: ChainTrainer) -> None:
    live = MemoryReceiver(EngineId("m"), trainer.weights, receives_into=ReceivesInto.LIVE)
    with pytest.raises(ConfigError, match="receives a version over the one"):
        Follower(trainer.store, live, "m")


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "x" * 200, "a b"])
def test_a_name_that_could_lead_elsewhere_is_refused(trainer: ChainTrainer, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a follower"):
        Follower(trainer.store, MemoryReceiver(EngineId("m"), trainer.weights), name)


def test_a_loop_tells_what_changes_and_says_when_it_ends(trainer: ChainTrainer) -> None:
    engine, news = MemoryReceiver(EngineId("m"), trainer.weights), list[FollowerReport]()

    async def run() -> None:
        follower = Follower(trainer.store, engine, "m")
        following = asyncio.create_task(follower.follow(0.01, news.append))
        for number in range(2):
            version = trainer.publish(number)
            async with asyncio.timeout(20):
                while engine.version != version or not news or news[-1].version != version:
                    await asyncio.sleep(0.01)
        assert standings(trainer.store)[0].report.following
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())
    served = [report.version.number for report in news if report.version]
    assert served == sorted(set(served)), "each is told once"
    (standing,) = standings(trainer.store)
    assert not standing.report.following
    assert standing.report.version == engine.version


def test_a_report_that_cannot_be_read_is_told_as_its_error(trainer: ChainTrainer, world: World) -> None:
    trainer.publish(0)
    world.pull()
    trainer.store.put("followers/broken.msgpack", [b"\xc1"])
    put_report(trainer.store, msgspec.structs.replace(world.follower.report, name="z"))
    broken, good, last = standings(trainer.store)
    assert broken.report.name == "broken"
    assert "cannot be read" in broken.report.error
    assert (good.report.name, last.report.name) == ("f", "z")
