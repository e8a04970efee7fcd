"""What a chain forgets under its budget: never what is needed, always what is not, and never its beginning alone."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from chains import append_all, blank, holds
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.config.sync import ChainConfig
from fathom.core.errors import BudgetError, PayloadError
from fathom.sync.chain.leases import Lease, LeaseRecord, leased
from fathom.sync.chain.links import LinkName
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.retention import Retention
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest

MB = 1 << 20


def delta(number: int, incarnation: int = 1) -> LinkName:
    return LinkName(incarnation, number, False)


def anchor(number: int, incarnation: int = 1) -> LinkName:
    return LinkName(incarnation, number, True)


@st.composite
def chains(draw):
    """Links as writers of one or two incarnations leave them, in order, with their sizes."""
    names: list[LinkName] = []
    for incarnation in range(1, draw(st.integers(1, 2)) + 1):
        number = draw(st.integers(0, 5))
        names.append(anchor(number, incarnation))
        for _ in range(draw(st.integers(0, 12))):
            number += draw(st.integers(1, 2))
            kinds = draw(st.sampled_from([[False], [False], [True], [False, True]]))
            names += [LinkName(incarnation, number, kind) for kind in kinds]
    return {name: draw(st.integers(1, 100)) for name in names}


def reachable(names: set[LinkName]) -> set[tuple[int, int]]:
    """Versions that can be rebuilt: deltas count from the version before."""
    found: set[tuple[int, int]] = set()
    for name in sorted(names):
        version = (name.incarnation, name.number)
        before = max((each for each in {(n.incarnation, n.number) for n in names} if each < version), default=None)
        if name.anchor or before in found:
            found.add(version)
    return found


@given(sizes=chains(), budget=st.integers(0, 1000), keep_steps=st.integers(0, 6), data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_dropped_is_not_needed_and_no_more_than_the_budget_asks(sizes, budget, keep_steps, data):
    needed = data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=2))
    retention = Retention(budget_bytes=budget, keep_steps=keep_steps)
    dropped = retention.droppable(sizes, needed)
    newest = max(sizes)
    in_any_case = {(name.incarnation, name.number) for name in [*needed, newest]} | {
        (name.incarnation, name.number) for name in sizes if name.number >= newest.number - keep_steps
    }
    left = set(sizes)
    assert reachable(left) == {(name.incarnation, name.number) for name in left}
    for name in [None, *dropped]:  # whenever the writer dies between two of them
        left -= {name}
        assert in_any_case <= reachable(left)
        assert reachable(left) == {(each.incarnation, each.number) for each in left} or name is None
    if sum(sizes.values()) <= budget:
        assert dropped == []
    elif sum(sizes[name] for name in left) > budget:
        oldest = min(in_any_case)
        assert not [name for name in left if name.anchor and (name.incarnation, name.number) <= oldest][1:]


def models(count: int) -> list[dict[str, torch.Tensor]]:
    """About 0.7 MB each, of which 10 KB change."""
    generator = torch.Generator().manual_seed(0)
    tensors = [{"w": (torch.randn(500_000, generator=generator) * 0.02).bfloat16()}]
    for _ in range(1, count):
        chosen = torch.rand(500_000, generator=generator) < 0.01
        tensors.append({"w": torch.where(chosen, tensors[-1]["w"] * 1.01, tensors[-1]["w"])})
    return tensors


MODELS = models(24)


def taken(store: Store) -> int:
    return sum(stat.size_bytes for folder in ("links", "data") for stat in store.list(folder).values())


def append_under(store: Store, budget_mb: int, keep_steps: int) -> tuple[int, list[Exception]]:
    """The most it ever took after an append, and what was complained of."""
    troubles: list[Exception] = []
    config = ChainConfig(budget_mb=budget_mb, keep_steps=keep_steps, anchor_every=1000)
    writer, reader, most = ChainWriter(store, config, troubles.append), ChainReader(store), 0
    manifests = []
    for number, tensors in enumerate(MODELS):
        manifests.append(build_manifest(number, 1, manifests[-1].version if manifests else None, tensors))
        writer.append(manifests[-1], tensors)
        most = max(most, taken(store))
        oldest = max(0, number - keep_steps)
        into = blank(tensors)
        reader.materialise(manifests[oldest].version, into, None)
        assert holds(into, manifests[oldest]), "the window is kept"
    return most, troubles


def test_the_budget_is_kept_by_anchors_that_come_early_enough(tmp_path):
    most, troubles = append_under(Store.open(tmp_path), 2, 3)
    assert most <= 2 * MB
    assert troubles == []
    assert len([name for name in Store.open(tmp_path).list("links") if ".anchor." in name]) <= 2


def test_a_budget_that_cannot_hold_the_window_is_reported_once_with_one_that_would(tmp_path):
    _, troubles = append_under(Store.open(tmp_path / "small"), 1, 4)
    (trouble,) = troubles
    assert isinstance(trouble, BudgetError)
    enough = int(str(trouble).rpartition("; ")[2].removesuffix(" MB would do"))
    assert enough <= 3
    most, troubles = append_under(Store.open(tmp_path / "enough"), enough, 4)
    assert most <= enough * MB
    assert troubles == []


def test_a_chain_within_its_budget_forgets_nothing(tmp_path):
    store = Store.open(tmp_path)
    append_all(store, MODELS, budget_mb=100)
    assert {link.version.number for link in ChainReader(store).links()} == set(range(24))


def test_what_a_reader_has_leased_stays_until_it_is_done(tmp_path):
    store = Store.open(tmp_path)
    writer = ChainWriter(store, ChainConfig(budget_mb=0, anchor_every=2))
    manifests = [build_manifest(number, 1, None, tensors) for number, tensors in enumerate(MODELS[:8])]
    for number in (0, 1, 2):
        writer.append(manifests[number], MODELS[number])
    with Lease(store, manifests[2].version, seconds=30) as lease:
        for number in range(3, 7):
            writer.append(manifests[number], MODELS[number])
        into = blank(MODELS[2])
        ChainReader(store).materialise(manifests[2].version, into, None)
        assert holds(into, manifests[2])
        assert {name.number for name in map(LinkName.parse, store.list("links")) if name} == set(range(2, 7))
    lease.close()
    assert store.list("leases") == {}
    writer.append(manifests[7], MODELS[7])
    with pytest.raises(PayloadError, match="v2@1 is not in the chain"):
        ChainReader(store).materialise(manifests[2].version, blank(MODELS[2]), None)


def test_what_engines_hold_stays(tmp_path):
    store = Store.open(tmp_path)
    writer = ChainWriter(store, ChainConfig(budget_mb=0, anchor_every=1))
    manifests = [build_manifest(number, 1, None, tensors) for number, tensors in enumerate(MODELS[:6])]
    for number, manifest in enumerate(manifests):
        writer.append(manifest, MODELS[number], [manifests[min(number, 1)].version])
    assert {name.number for name in map(LinkName.parse, store.list("links")) if name} == set(range(1, 6))


def test_a_lease_is_renewed_and_that_of_a_dead_reader_expires(tmp_path):
    store = Store.open(tmp_path)
    version = build_manifest(3, 1, None, MODELS[3]).version
    with Lease(store, version, seconds=0.15):
        (name,) = store.list("leases")
        first = msgspec.msgpack.decode(store.get(name), type=LeaseRecord).expires_at
        deadline = time.monotonic() + 10
        while msgspec.msgpack.decode(store.get(name), type=LeaseRecord).expires_at == first:
            assert time.monotonic() < deadline, "it is not renewed"
            time.sleep(0.01)
        assert leased(store, time.time()) == [delta(3)]
    dead = LeaseRecord(oldest=version, expires_at=1000.0)
    store.put("leases/dead.msgpack", [msgspec.msgpack.encode(dead)])
    assert leased(store, 1030.0) == [delta(3)], "clocks may differ"
    assert leased(store, 1100.0) == []
    assert store.list("leases") == {}
    store.put("leases/odd.msgpack", [b"no lease"])
    with pytest.raises(PayloadError, match=r"leases/odd.msgpack in .* is no lease; remove it"):
        leased(store, 0.0)
