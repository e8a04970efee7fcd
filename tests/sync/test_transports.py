"""Transports: what is published arrives to the bit, or the error names the tensor; nothing is left behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import UserDict
from pathlib import Path

import pytest
import torch
from offers import ENGINE, hold_and_offer, receive

from fathom.config.families import FabricKind, TransportKind
from fathom.config.sync import PeerConfig, SyncConfig
from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.manifest import DiskSource, SharedMemorySource
from fathom.sync.digest import build_manifest, digest
from fathom.sync.transports import TRANSPORTS
from fathom.sync.transports.disk import DiskTransport
from fathom.sync.transports.shared import SharedTransport


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(5, 3, generator=generator).bfloat16(),
        "block.q": torch.randn(4, 4, generator=generator),
        "block.k": torch.randn(4, 4, generator=generator).t(),
        "scale": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def staging() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model().items()}


@pytest.fixture(params=list(TransportKind))
def transport(request, tmp_path):
    p2p = PeerConfig(fabric=FabricKind.MEMORY) if request.param is TransportKind.P2P else None
    opened = TRANSPORTS[request.param](tmp_path, SyncConfig(transport=request.param, p2p=p2p))
    yield opened
    opened.close()


def test_every_kind_has_a_transport():
    assert set(TRANSPORTS) == set(TransportKind)


def test_what_is_published_arrives_to_the_bit(transport):
    tensors, into = model(), staging()
    manifest = build_manifest(0, 1, None, tensors)
    asyncio.run(receive(hold_and_offer(transport, manifest, tensors), manifest, into))
    assert digest(into) == manifest.version.digest
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)


def test_a_version_stays_whole_while_the_next_one_is_written(transport):
    versions = [model(seed) for seed in range(6)]
    before = None
    for number, tensors in enumerate(versions):
        manifest = build_manifest(number, 1, None, tensors)
        transport.hold(manifest, tensors)
        for each in filter(None, [before, manifest]):
            into = staging()
            asyncio.run(receive(transport.offer(each.version, [ENGINE]), each, into))
            assert digest(into) == each.version.digest
        if before is not None:
            transport.release(before.version)
        before = manifest


@pytest.mark.parametrize("kind", [TransportKind.SHARED, TransportKind.DISK])
def test_closing_removes_everything_and_can_be_repeated(tmp_path, kind):
    transport = TRANSPORTS[kind](tmp_path, SyncConfig(transport=kind))
    manifest = build_manifest(0, 1, None, model())
    path = Path(hold_and_offer(transport, manifest, model()).path)
    assert path.exists()
    transport.close()
    transport.close()
    assert not path.exists()


def renamed(into):
    into["block.query"] = into.pop("block.q")


def missing_place(into):
    del into["scale"]


def stale_head(into):
    into["lm_head"] = torch.ones(5, 3, dtype=torch.bfloat16)


def transposed(into):
    into["embed"] = torch.ones(3, 5, dtype=torch.bfloat16)


def recast(into):
    into["embed"] = torch.ones(5, 3, dtype=torch.float16)


def strided(into):
    into["block.q"] = torch.ones(4, 4)[:, ::1].t()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed, r"'block.query'.*'block.q'"),
        (missing_place, "'scale'"),
        (stale_head, "'lm_head'"),
        (transposed, "'embed'"),
        (recast, r"'embed'.*BF16.*F16"),
        (strided, "'block.q'"),
    ],
)
def test_a_model_of_another_form_is_refused_by_name_before_a_byte_is_written(transport, change, named):
    into = staging()
    change(into)
    before = digest(into)
    manifest = build_manifest(0, 1, None, model())
    with pytest.raises(PayloadError, match=named):
        asyncio.run(receive(hold_and_offer(transport, manifest, model()), manifest, into))
    assert digest(into) == before


class Gate(UserDict):
    """Tensors of which one, asked for by the copying thread, is only given once the gate is open."""

    def __init__(self, tensors, name):
        super().__init__(tensors)
        self.name, self.reached, self.opened = name, threading.Event(), threading.Event()

    def __getitem__(self, name):
        if name == self.name and threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.opened.wait(10)
        return super().__getitem__(name)


def test_once_cancelled_nothing_writes_any_more(transport):
    tensors, into = model(), Gate(staging(), "embed")
    manifest = build_manifest(0, 1, None, tensors)
    source = hold_and_offer(transport, manifest, tensors)

    async def scenario():
        receiving = asyncio.create_task(receive(source, manifest, into))
        await asyncio.to_thread(into.reached.wait, 10)
        receiving.cancel()
        await asyncio.sleep(0.02)
        assert not receiving.done(), "it returned while its thread could still write"
        into.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await receiving

    asyncio.run(scenario())
    assert not into["scale"].any(), "it went on after it was cancelled"


@pytest.mark.parametrize("source_type", [SharedMemorySource, DiskSource])
def test_a_source_that_is_gone_or_short_or_garbage_is_a_payload_fault(tmp_path, source_type):
    manifest = build_manifest(0, 1, None, model())
    gone = source_type(path=str(tmp_path / "gone"))
    with pytest.raises(PayloadError, match="cannot be read from"):
        asyncio.run(receive(gone, manifest, staging()))
    short = tmp_path / "short"
    short.write_bytes(b"\x01" * 9)
    with pytest.raises(PayloadError, match="v0@1"):
        asyncio.run(receive(source_type(path=str(short)), manifest, staging()))


def test_a_disk_file_of_another_form_than_its_manifest_is_refused_by_name(tmp_path):
    transport = DiskTransport(tmp_path)
    other = model() | {"embed": torch.zeros(15, dtype=torch.bfloat16)}
    source = hold_and_offer(transport, build_manifest(0, 1, None, other), other)
    with pytest.raises(PayloadError, match="'embed'"):
        asyncio.run(receive(source, build_manifest(0, 1, None, model()), staging()))


def test_shared_files_are_private_reused_and_two_in_number(tmp_path):
    transport = SharedTransport(tmp_path, memory_folder=tmp_path)
    inodes, previous = [], None
    for number in range(6):
        manifest = build_manifest(number, 1, None, model(number))
        path = Path(hold_and_offer(transport, manifest, model(number)).path)
        inodes.append(path.stat().st_ino)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if previous is not None:
            transport.release(previous)
        previous = manifest.version
    assert len(set(inodes)) == 2
    assert inodes[0::2] == [inodes[0]] * 3
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_a_released_shared_file_of_another_size_is_replaced(tmp_path):
    transport = SharedTransport(tmp_path, memory_folder=tmp_path)
    small = build_manifest(0, 1, None, model())
    hold_and_offer(transport, small, model())
    transport.release(small.version)
    larger = model() | {"more": torch.ones(100)}
    hold_and_offer(transport, build_manifest(1, 1, None, larger), larger)
    assert len(list(tmp_path.iterdir())) == 1
    transport.close()


def test_shared_names_cannot_be_guessed(tmp_path):
    names = set()
    for number in range(2):
        transport = SharedTransport(tmp_path, memory_folder=tmp_path)
        names.add(Path(hold_and_offer(transport, build_manifest(number, 1, None, model()), model()).path).name)
        transport.close()
    assert len(names) == 2
    assert all(len(name.rsplit("-", 1)[1]) == 32 for name in names)


OWNER = """
import sys, time, torch
from pathlib import Path
from fathom.sync.digest import build_manifest
from fathom.sync.transports.shared import SharedTransport
folder = Path(sys.argv[1])
tensors = {"w": torch.ones(8)}
SharedTransport(folder, memory_folder=folder).hold(build_manifest(0, 1, None, tensors), tensors)
print("written", flush=True)
time.sleep(60)
"""


def test_files_of_a_killed_process_are_removed_by_the_next_and_those_of_a_live_one_are_not(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout.readline() == b"written\n"
        SharedTransport(tmp_path, memory_folder=tmp_path).close()
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(owner.pid, signal.SIGKILL)
    SharedTransport(tmp_path, memory_folder=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_without_shared_memory_the_file_lies_in_the_run_folder(tmp_path):
    transport = SharedTransport(tmp_path, memory_folder=tmp_path / "absent")
    source = hold_and_offer(transport, build_manifest(0, 1, None, model()), model())
    assert Path(source.path).parent == tmp_path
    transport.close()


def test_disk_keeps_the_last_released_versions_and_clears_what_an_earlier_process_left(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "v9@1.safetensors").write_bytes(b"old")
    (folder / "v9@1.unfinished").write_bytes(b"old")
    transport, previous = DiskTransport(tmp_path, keep=1), None
    for number in range(4):
        manifest = build_manifest(number, 1, None, model(number))
        hold_and_offer(transport, manifest, model(number))
        if previous is not None:
            transport.release(previous)
        previous = manifest.version
    assert sorted(path.name for path in folder.iterdir()) == ["v2@1.safetensors", "v3@1.safetensors"]
    transport.close()
    assert list(folder.iterdir()) == []


def test_a_disk_version_can_be_written_again_after_a_release(tmp_path):
    transport = DiskTransport(tmp_path, keep=1)
    manifest = build_manifest(0, 1, None, model())
    for _ in range(3):
        source = hold_and_offer(transport, manifest, model())
        transport.release(manifest.version)
    hold_and_offer(transport, manifest, model())
    other = build_manifest(1, 1, None, model(1))
    hold_and_offer(transport, other, model(1))
    transport.release(other.version)
    assert Path(source.path).exists()


def test_a_medium_that_fails_is_a_delivery_error_that_names_the_way_out(tmp_path):
    transport = DiskTransport(tmp_path)
    (tmp_path / "weights").rmdir()
    with pytest.raises(DeliveryError, match=r"sync.transport = 'shared'"):
        hold_and_offer(transport, build_manifest(0, 1, None, model()), model())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_are_published_and_received_to_the_bit(transport):
    tensors = {name: tensor.cuda() for name, tensor in model().items()}
    into = {name: tensor.cuda() for name, tensor in staging().items()}
    manifest = build_manifest(0, 1, None, tensors)
    assert manifest == build_manifest(0, 1, None, model())
    asyncio.run(receive(hold_and_offer(transport, manifest, tensors), manifest, into))
    assert digest(into) == manifest.version.digest
