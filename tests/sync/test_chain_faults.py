"""Faults of media, at every operation and everywhere in the bytes: a version comes back to the bit, or is refused."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from chains import append_all, blank, first, holds, versions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fathom.config.sync import ChainConfig
from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.manifest import Manifest
from fathom.sync.chain.media.faulty import FaultyMedium, MediumFault
from fathom.sync.chain.media.local import LocalMedium
from fathom.sync.chain.media.objects import ObjectMedium
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest
from fathom.sync.held import Held

TENSORS = versions(6)


def numbered(count: int) -> list[Manifest]:
    manifests: list[Manifest] = []
    for number in range(count):
        parent = manifests[-1].version if manifests else None
        manifests.append(build_manifest(number, 1, parent, TENSORS[number]))
    return manifests


MANIFESTS = numbered(6)


def written(anchor_every: int) -> dict[str, bytes]:
    store = Store.open(f"memory://written{anchor_every}")
    append_all(store, TENSORS, anchor_every=anchor_every)
    return {name: store.get(name) for folder in ("links", "data") for name in store.list(folder)}


CHAINS = [written(anchor_every) for anchor_every in (1, 2, 3, 6)]


def lay_out(chain: dict[str, bytes], folder: Path) -> None:
    for name, content in chain.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def refused(reader: ChainReader, target: Manifest, into: dict[str, Tensor], held: Held | None) -> str | None:
    try:
        reader.materialise(target.version, into, held)
    except PayloadError as error:
        return str(error)
    return None


def damage(path: Path, chance: random.Random) -> None:
    """One of the things that happen to files."""
    content = bytearray(path.read_bytes())
    match chance.choice(["flip", "flip", "flip", "cut", "remove", "swap", "zero"]):
        case "flip" if content:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[: chance.randrange(len(content) + 1)])
        case "swap":
            other = chance.choice(sorted(path.parent.iterdir()))
            path.write_bytes(other.read_bytes())
        case "zero":
            path.write_bytes(bytes(len(content)))
        case _:
            path.unlink()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_whatever_is_damaged_a_version_is_right_to_the_bit_or_refused_by_name(seed):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        lay_out(chance.choice(CHAINS), Path(folder))
        store, manifests = Store.open(folder), MANIFESTS
        reader = ChainReader(store)
        if chance.random() < 0.5:
            reader.links()  # it has read them before they are damaged
        for _ in range(chance.randint(1, 3)):
            damage(chance.choice(sorted(Path(folder).glob("*/*"))), chance)
        for _ in range(3):
            target, base = chance.choice(manifests), chance.choice([None, *range(6)])
            held = None if base is None else Held(version=manifests[base].version, tensors=TENSORS[base])
            into = blank(first())
            refusal = refused(reader, target, into, held)
            if refusal is None:
                assert holds(into, target)
            else:
                assert re.search(r"(links|data)/v\d@1\.|nothing leads to|which holds|empty", refusal)


def test_a_flipped_byte_in_a_delta_is_healed_from_an_anchor_or_refused_with_tensor_and_object(tmp_path):
    store = Store.open(tmp_path)
    manifests = append_all(store, TENSORS, anchor_every=3)
    held = Held(version=manifests[2].version, tensors=TENSORS[2])
    for number, heals in ((3, True), (4, False)):
        path = tmp_path / f"data/v{number}@1.delta.bin"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        into = blank(first())
        if heals:
            ChainReader(store).materialise(manifests[number].version, into, held)
            assert holds(into, manifests[number])
        else:
            with pytest.raises(PayloadError, match=r"tensor '\w+': .*data/v4@1.delta.bin"):
                ChainReader(store).materialise(manifests[number].version, into, held)


def test_a_delta_is_never_applied_twice_nor_to_a_stranger(tmp_path):
    store = Store.open(tmp_path)
    manifests = append_all(store, TENSORS[:4])
    reader = ChainReader(store)
    assert [link.version.number for link in reader.path_to(manifests[3].version, manifests[1].version)] == [2, 3]
    assert reader.path_to(manifests[1].version, manifests[1].version) == ()
    lying = Held(version=manifests[2].version, tensors=TENSORS[3])
    into = blank(first())
    reader.materialise(manifests[3].version, into, lying)
    assert holds(into, manifests[3]), "what was held lied, so it is rebuilt from the anchor"
    (tmp_path / "data/v0@1.anchor.bin").unlink()
    with pytest.raises(PayloadError, match=r"checksum is wrong after data/v3@1.delta.bin.*v0@1.anchor.bin is missing"):
        reader.materialise(manifests[3].version, blank(first()), lying)


def test_a_reader_that_is_behind_takes_what_it_lacks_and_one_that_is_ahead_goes_back(tmp_path):
    store = Store.open(tmp_path)
    manifests = append_all(store, TENSORS)
    reader, tensors, version = ChainReader(store), blank(first()), None
    for number in (0, 2, 2, 5, 1, 3):
        held, into = (Held(version=version, tensors=tensors) if version else None), blank(first())
        reader.materialise(manifests[number].version, into, held)
        assert holds(into, manifests[number])
        tensors, version = into, manifests[number].version


def append_until_it_fails(store: Store) -> tuple[list[Manifest], bool]:
    """The versions that were said to be appended, and whether all were. Without a budget old ones are dropped early."""
    done: list[Manifest] = []
    try:
        writer = ChainWriter(store, ChainConfig(anchor_every=2, budget_mb=0, keep_steps=1))
        for manifest, tensors in zip(MANIFESTS, TENSORS, strict=True):
            writer.append(manifest, tensors)
            done.append(manifest)
    except (DeliveryError, PayloadError):
        return done, False
    return done, True


@pytest.mark.parametrize("fault", list(MediumFault))
def test_a_writer_killed_at_any_operation_leaves_no_version_that_is_not_whole(tmp_path, fault):
    moment, finished = 0, False
    while not finished:
        medium = LocalMedium(tmp_path / f"{moment}")
        done, finished = append_until_it_fails(Store(FaultyMedium(medium, {moment: fault}, from_then_on=True)))
        store = Store(medium)
        reader = ChainReader(store)
        listed = [link.version for link in reader.links()]
        newest = max((version.number for version in listed), default=0)
        assert {each.version for each in done if each.version.number >= newest - 1} <= set(listed)
        assert len(done) <= newest + 1
        writer = ChainWriter(store, ChainConfig())
        assert {name.rpartition("/")[2].rpartition(".")[0] for name in store.list("data")} <= {
            name.rpartition("/")[2].rpartition(".")[0] for name in store.list("links")
        }
        for manifest in MANIFESTS:
            if manifest.version in listed:
                into = blank(first())
                reader.materialise(manifest.version, into, None)
                assert holds(into, manifest)
        resumed = build_manifest(0, 2, None, TENSORS[5])
        writer.append(resumed, TENSORS[5])
        assert len(ChainReader(store).path_to(resumed.version, None)) == 1
        moment += 1
    assert moment > 30


@pytest.mark.parametrize("fault", list(MediumFault))
def test_after_a_fault_the_same_writer_goes_on_with_an_anchor(fault):
    for moment in range(2, 26):
        inner = ObjectMedium(f"memory://{fault}{moment}")
        medium = FaultyMedium(inner, {moment: fault})
        try:
            writer = ChainWriter(Store(medium), ChainConfig(anchor_every=3))
        except (DeliveryError, PayloadError):
            continue
        failed = set()
        for number in range(6):
            try:
                writer.append(MANIFESTS[number], TENSORS[number])
            except (DeliveryError, PayloadError):
                failed.add(number)
        assert len(failed) <= 1
        reader = ChainReader(Store(inner))
        for number in {*range(6)} - failed:
            into = blank(first())
            reader.materialise(MANIFESTS[number].version, into, None)
            assert holds(into, MANIFESTS[number])


WRITER = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from chains import versions
from fathom.config.sync import ChainConfig
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter
from fathom.sync.digest import build_manifest
writer = ChainWriter(Store.open(sys.argv[1]), ChainConfig(anchor_every=3, budget_mb=0, keep_steps=2))
tensors = versions(6)
for number in range(10**6):
    manifest = build_manifest(number, int(sys.argv[3]), None, tensors[number % 6])
    writer.append(manifest, tensors[number % 6])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_versions_and_its_leftovers_are_removed(tmp_path):
    for incarnation in range(1, 5):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent), str(incarnation)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writing:
            said = [int(writing.stdout.readline()) for _ in range(4)]
            time.sleep(random.random() * 0.05)
            writing.kill()
            said += [int(line) for line in writing.stdout.read().split()]
        store = Store.open(tmp_path)
        reader = ChainReader(store)
        versions_there = {link.version for link in reader.links()}
        assert (incarnation, said[-1]) in {(version.incarnation, version.number) for version in versions_there}
        for version in versions_there:
            into = blank(first())
            reader.materialise(version, into, None)
            assert holds(into, build_manifest(0, 1, None, TENSORS[version.number % 6]))
        ChainWriter(store, ChainConfig())
        assert {Path(name).stem for name in store.list("data")} == {Path(name).stem for name in store.list("links")}
        assert not list(tmp_path.glob("*/.*"))


def test_names_do_not_lead_out_of_a_store(tmp_path):
    store = Store.open(tmp_path / "chain")
    for name in ("../x", "links/../../x", "links/.x", "/etc/passwd", "data/a/b", "data/"):
        with pytest.raises(AssertionError, match="no name"):
            store.put(name, [b"x"])


def test_a_large_object_goes_through_a_file():
    store = Store.open("memory://large")
    chunk = bytes(40 << 20)
    store.put("data/x.bin", [chunk, b"y", chunk, b"z"])
    assert store.list("data")["data/x.bin"].size_bytes == 2 * len(chunk) + 2
    assert store.read("data/x.bin", len(chunk), len(chunk) + 2) == b"y\x00"
    store.delete("data/x.bin")
