"""A chain: what was appended comes back to the bit, over the cheapest path; what is damaged is named."""

from __future__ import annotations

import pytest
import torch
from chains import append_all, blank, first, holds, versions

from fathom.config.sync import ChainConfig
from fathom.core.errors import PayloadError
from fathom.sync.chain.links import Encoding
from fathom.sync.chain.media.faulty import FaultyMedium
from fathom.sync.chain.media.objects import ObjectMedium
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest
from fathom.sync.held import Held


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return Store.open(tmp_path / "chain" if request.param == "folder" else f"memory://{tmp_path}")


def test_every_version_comes_back_to_the_bit_from_nothing_and_from_each_earlier_one(store):
    tensors = versions(7)
    manifests = append_all(store, tensors, anchor_every=3)
    reader = ChainReader(store)
    for number, manifest in enumerate(manifests):
        into = blank(first())
        assert reader.materialise(manifest.version, into, None) > 0
        assert holds(into, manifest)
        for before in range(number):
            held = Held(version=manifests[before].version, tensors=tensors[before])
            into = blank(first())
            reader.materialise(manifest.version, into, held)
            assert holds(into, manifest)
            assert holds(tensors[before], manifests[before]), "what serves was written to"


def test_a_delta_is_small_and_holds_only_what_changed(store):
    append_all(store, versions(2))
    anchor, delta = ChainReader(store).links()
    assert anchor.parent is None
    assert delta.parent == anchor.version
    assert delta.size_bytes < 0.1 * anchor.size_bytes
    encodings = {entry.name: piece.encoding for entry, piece in zip(delta.manifest.tensors, delta.pieces, strict=True)}
    assert encodings["mask"] is encodings["norm"] is encodings["empty"] is Encoding.SAME
    assert encodings["embed"] is encodings["codes"] is Encoding.INDEX


def test_a_version_at_which_an_anchor_is_due_has_both_and_each_reader_takes_the_cheaper(store):
    manifests = append_all(store, versions(7), anchor_every=3)
    reader = ChainReader(store)
    assert [(link.version.number, link.parent is None) for link in reader.links()] == [
        (0, True),
        *[(number, kind) for number in range(1, 7) for kind in ([False, True] if number % 3 == 0 else [False])],
    ]

    def path(to: int, held: int | None) -> list[tuple[int, bool]]:
        links = reader.path_to(manifests[to].version, None if held is None else manifests[held].version)
        return [(link.version.number, link.parent is None) for link in links]

    assert path(3, 2) == [(3, False)]
    assert path(3, None) == [(3, True)]
    assert path(5, 1) == [(2, False), (3, False), (4, False), (5, False)]
    assert path(5, None) == [(3, True), (4, False), (5, False)]
    assert path(1, 4) == [(0, True), (1, False)]
    assert path(6, 6) == []


def test_a_long_chain_is_not_read_to_its_beginning():
    medium = FaultyMedium(ObjectMedium("memory://long"), {})
    manifests = append_all(Store(medium), versions(40), anchor_every=6)

    def read_for(to: int, held: int | None) -> int:
        before = len(medium.operations)
        reader = ChainReader(Store(medium))
        path = reader.path_to(manifests[to].version, None if held is None else manifests[held].version)
        assert path[-1].version == manifests[to].version
        return len(medium.operations) - before - 1

    assert read_for(39, None) <= 2 + 3
    assert read_for(39, 38) <= 2
    assert read_for(3, 39) <= 4


def test_a_chain_goes_on_in_a_new_incarnation_with_an_anchor(store):
    tensors = versions(4)
    append_all(store, tensors[:3])
    manifest = build_manifest(1, 2, None, tensors[3])
    ChainWriter(store, ChainConfig()).append(manifest, tensors[3])
    reader = ChainReader(store)
    assert reader.newest().version == manifest.version
    assert [link.version.name for link in reader.path_to(manifest.version, None)] == ["v1@2"]
    assert reader.find(1).version == manifest.version
    assert reader.find(1, incarnation=1).version.name == "v1@1"
    assert reader.find(2).version.name == "v2@1"


def test_what_is_not_there_is_refused_with_what_is(store):
    reader = ChainReader(store)
    assert reader.newest() is None
    with pytest.raises(PayloadError, match=r"v3 is not in the chain .*, which is empty"):
        reader.find(3)
    manifests = append_all(store, versions(2))
    with pytest.raises(PayloadError, match=r"v3@1 is not in the chain .*, which holds v0@1 to v1@1"):
        reader.find(3, 1)
    other = build_manifest(1, 1, None, versions(3)[2]).version
    with pytest.raises(PayloadError, match=r"v1@1.delta.msgpack is of another digest"):
        reader.path_to(other, manifests[0].version)


def test_a_version_of_the_same_number_and_other_bytes_replaces_the_one_that_failed(store):
    tensors = versions(3)
    writer, reader = ChainWriter(store, ChainConfig()), ChainReader(store)
    one, failed, other = (build_manifest(min(at, 1), 1, None, each) for at, each in enumerate(tensors))
    writer.append(one, tensors[0])
    writer.append(failed, tensors[1])
    writer.append(failed, tensors[1])
    assert reader.newest().version == failed.version
    writer.append(other, tensors[2])
    assert reader.find(1).version == other.version
    into = blank(first())
    reader.materialise(other.version, into, Held(version=one.version, tensors=tensors[0]))
    assert holds(into, other)


def test_a_chain_in_which_all_changed_is_made_of_anchors(store):
    generator = torch.Generator().manual_seed(5)
    tensors = [{"w": torch.randn(3000, generator=generator)} for _ in range(3)]
    append_all(store, tensors)
    assert all(link.parent is None for link in ChainReader(store).links())
