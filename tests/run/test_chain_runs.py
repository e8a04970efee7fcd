"""Every run keeps its chain: its versions can be rebuilt afterwards, whatever the transport and however it ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from small_runs import ENGINES, SCRIPTED, RunProcess, require_sound, small_config

from fathom import Run
from fathom.config.sync import ChainConfig, SyncConfig
from fathom.core.errors import ConfigError
from fathom.core.ids import PolicyVersion
from fathom.ledger.events import Event, FaultSeen, Published, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.run.weights.keeping import open_transport
from fathom.sync.chain.keeper import Keeper
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.digest import digest, shaped


def published(run: Path) -> set[PolicyVersion]:
    with LedgerReader(run / "ledger") as reader:
        return {entry.event.version for entry in reader.events(Published, include_undone=True)}


def chain_troubles(run: Path) -> list[str]:
    with LedgerReader(run / "ledger") as reader:
        faults = [entry.event for entry in reader.events(FaultSeen, include_undone=True)]
    return [fault.detail for fault in faults if fault.component == "chain of versions"]


def rebuilt(store: Store) -> set[PolicyVersion]:
    """Every version of a chain, brought back from nothing and digested."""
    reader, found = ChainReader(store), set[PolicyVersion]()
    for link in reader.links():
        into = {
            entry.name: shaped(torch.zeros(entry.size_bytes, dtype=torch.uint8), entry)
            for entry in link.manifest.tensors
        }
        reader.materialise(link.version, into, None)
        assert digest(into) == link.version.digest
        found.add(link.version)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("transport", ["shared", "delta"])
def test_every_version_of_a_run_can_be_rebuilt(tmp_path, engine, transport):
    result = Run(small_config(tmp_path, engine, f"sync.transport={transport}")).start()
    assert result.reason == "steps"
    require_sound(result.folder)
    versions = rebuilt(Store.of_run(result.folder, None))
    assert {version.number for version in versions} == set(range(7))
    assert versions == published(result.folder)
    assert chain_troubles(result.folder) == []


def test_without_a_budget_nothing_is_kept(tmp_path):
    async def scenario(budget_mb: int) -> Keeper | None:
        config = SyncConfig(chain=ChainConfig(budget_mb=budget_mb))
        transport, keeper = open_transport(tmp_path, tmp_path, config, None)
        transport.close()
        return keeper

    assert asyncio.run(scenario(0)) is None
    assert isinstance(asyncio.run(scenario(1)), Keeper)


@pytest.mark.parametrize("transport", ["shared", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_chain_of_a_killed_one(tmp_path, transport):
    config = small_config(tmp_path, SCRIPTED, f"sync.transport={transport}")
    killed = RunProcess(config, None, kill_after=(StepTaken, 3))
    killed.wait()
    before = rebuilt(Store.of_run(killed.run, None))
    assert before
    assert Run.resume(killed.run).start().reason == "steps"
    require_sound(killed.run)
    versions = rebuilt(Store.of_run(killed.run, None))
    assert before < versions
    assert published(killed.run) <= versions
    assert {version.number for version in versions if version.incarnation == 2} == set(range(2, 7))


def test_a_chain_whose_medium_fails_is_recorded_once_and_the_run_goes_on(tmp_path):
    store = tmp_path / "shelf"

    def break_it(event: Event) -> None:
        if isinstance(event, StepTaken) and event.number == 2:
            (links,) = store.glob("*/links")
            links.rename(store / "taken-away")
            links.write_text("a file where a folder should be")

    result = Run(small_config(tmp_path, SCRIPTED, f'sync.chain.store="{store}"')).start([break_it])
    assert result.reason == "steps"
    require_sound(result.folder)
    (trouble,) = chain_troubles(result.folder)
    assert "cannot write links/" in trouble
    assert not (result.folder / "chain").exists()
    assert [path.name for path in store.glob("*/data")] == ["data"], "it lies below the name of the run"
    assert (store / result.folder.name).is_dir()


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_refused_when_the_run_starts(tmp_path):
    store = tmp_path / "shelf"
    store.write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"set sync.chain.store to another place"):
        Run(small_config(tmp_path, SCRIPTED, f'sync.chain.store="{store}"')).start()


def test_what_cannot_keep_a_chain_is_refused_before_the_run_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"sync.chain.budget_mb = 0 keeps none"):
        small_config(tmp_path, "sync.transport=delta", "sync.chain.budget_mb=0")
    with pytest.raises(ConfigError, match=r"must not hold credentials"):
        small_config(tmp_path, 'sync.chain.store="s3://key:secret@bucket/x"')
    with pytest.raises(ConfigError, match=r"seen by one process only"):
        small_config(tmp_path, 'sync.chain.store="memory://x"')
    with pytest.raises(ConfigError, match=r"sync.chain.store = 'nowhere://x'"):
        Run(small_config(tmp_path, SCRIPTED, 'sync.chain.store="nowhere://x"'))


def test_the_window_of_the_audit_is_kept_whatever_is_asked_for(tmp_path):
    clock = ("staleness.max_staleness=4", "staleness.publish_every=2")
    assert small_config(tmp_path, *clock).sync.chain.keep_steps == 6
    assert small_config(tmp_path, *clock, "sync.chain.keep_steps=2").sync.chain.keep_steps == 6
    assert small_config(tmp_path, *clock, "sync.chain.keep_steps=9").sync.chain.keep_steps == 9
