"""The keeper: a copy now, the rest beside the run, and a medium that fails stops nothing."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from chains import blank, first, holds, versions

from fathom.config.sync import ChainConfig
from fathom.core.manifest import Manifest
from fathom.sync.chain.keeper import Keeper
from fathom.sync.chain.media.faulty import FaultyMedium, MediumFault
from fathom.sync.chain.media.local import LocalMedium
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest

TENSORS = versions(8)
MANIFESTS: list[Manifest] = [build_manifest(number, 1, None, tensors) for number, tensors in enumerate(TENSORS)]


class Gated:
    """A local medium on which links are written only while the gate is open."""

    def __init__(self, root) -> None:
        self.inner = LocalMedium(root)
        self.gate = threading.Event()
        self.url, self.read, self.list = self.inner.url, self.inner.read, self.inner.list
        self.delete, self.sweep = self.inner.delete, self.inner.sweep

    def put(self, name, chunks) -> None:
        if name.startswith("links/"):
            assert self.gate.wait(10)
        self.inner.put(name, chunks)


def keeper_on(medium, timeout_s: float = 10.0) -> tuple[Keeper, list[Exception]]:
    troubles: list[Exception] = []
    return Keeper(ChainWriter(Store(medium), ChainConfig()), troubles.append, timeout_s), troubles


def kept(medium) -> set[int]:
    reader, found = ChainReader(Store(medium)), set()
    for link in reader.links():
        into = blank(first())
        reader.materialise(link.version, into, None)
        assert holds(into, MANIFESTS[link.version.number])
        found.add(link.version.number)
    return found


def test_tensors_may_change_as_soon_as_a_version_is_taken_and_none_is_skipped(tmp_path):
    medium = LocalMedium(tmp_path)
    keeper, troubles = keeper_on(medium)
    live = blank(TENSORS[0])
    for number, tensors in enumerate(TENSORS):
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        keeper.keep(MANIFESTS[number], live)
        live["embed"].fill_(torch.nan)
    keeper.close()
    keeper.close()
    assert kept(medium) == set(range(8))
    assert troubles == []


def test_at_most_one_is_behind_and_the_next_waits_for_it(tmp_path):
    medium = Gated(tmp_path)
    keeper, troubles = keeper_on(medium)
    keeper.keep(MANIFESTS[0], TENSORS[0])
    second = threading.Thread(target=keeper.keep, args=(MANIFESTS[1], TENSORS[1]))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    medium.gate.set()
    second.join(10)
    keeper.close()
    assert kept(medium.inner) == {0, 1}
    assert troubles == []


def test_a_version_that_comes_while_the_medium_hangs_is_not_kept_and_that_is_said_once(tmp_path):
    medium = Gated(tmp_path)
    keeper, troubles = keeper_on(medium, timeout_s=0.02)
    for number in range(4):
        keeper.keep(MANIFESTS[number], TENSORS[number])
    (trouble,) = troubles
    assert "v1@1 is not kept" in str(trouble)
    medium.gate.set()
    while 0 not in {link.version.number for link in ChainReader(Store(medium)).links()}:
        time.sleep(0.001)
    keeper.close()
    keeper, troubles = keeper_on(medium)
    keeper.keep(MANIFESTS[4], TENSORS[4])
    keeper.close()
    assert kept(medium.inner) == {0, 4}


@pytest.mark.parametrize("fault", list(MediumFault))
def test_a_medium_that_fails_is_reported_once_until_it_works_again(tmp_path, fault):
    inner = LocalMedium(tmp_path)
    full = {number: fault for number in range(5, 11)}
    medium = FaultyMedium(inner, full | {40: fault})
    keeper, troubles = keeper_on(medium)
    for number in range(8):
        keeper.keep(MANIFESTS[number], TENSORS[number])
    keeper.close()
    assert len(troubles) == 1
    found = kept(inner)
    assert {0, 6, 7} <= found
    assert len(found) < 8


def test_what_cannot_be_copied_is_reported(tmp_path):
    keeper, troubles = keeper_on(LocalMedium(tmp_path))
    keeper.keep(MANIFESTS[0], {})
    keeper.close()
    assert len(troubles) == 1
