"""Fabrics: one suite over the shipped fake and the real libraries, and the real ones between processes."""

import asyncio
import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from peers import ENGINE, model
from test_p2p_sharded import TENSOR, assert_holds

from fathom.config.families import FabricKind
from fathom.config.sync import PeerConfig
from fathom.core.errors import ConfigError, EngineError, MissingDependencyError
from fathom.core.manifest import PeerRank, PeerSource
from fathom.sync.digest import build_manifest, digest
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.p2p.fabrics import FABRICS
from fathom.sync.transports.p2p.fabrics.fabric import FabricError, Region, Write
from fathom.sync.transports.p2p.fabrics.memory_fabric import FabricFaults
from fathom.sync.transports.p2p.held import region
from fathom.sync.transports.p2p.peer_transport import PeerTransport
from fathom.sync.transports.p2p.sharded_receiver import ShardedReceiver

LIBRARIES = {FabricKind.NIXL: "nixl_cu12", FabricKind.MOONCAKE: "mooncake.engine"}
REAL = [pytest.param(kind, marks=pytest.mark.p2p) for kind in LIBRARIES]


def require(kind: FabricKind) -> None:
    """Skip where the library of a fabric is not installed, or cannot be loaded."""
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind], reason="see docs/how-to/p2p.md", exc_type=ImportError)


@pytest.fixture(params=[FabricKind.MEMORY, *REAL])
def pair(request):
    """A writing and a receiving side."""
    require(request.param)
    fabrics = [FABRICS[request.param]("127.0.0.1") for _ in range(2)]
    yield fabrics
    for fabric in fabrics:
        fabric.close()
        fabric.close()


def bytes_of(seed: int, size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Progress:
    """What the receiving side does while it waits."""

    def __init__(self, fabric):
        self.fabric, self.over = fabric, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def run(self):
        while not self.over.wait(0.0005):
            self.fabric.progress()


def go_on() -> None:
    return None


def test_many_writes_arrive_to_the_bit_and_nothing_else_is_touched(pair):
    ours, theirs = pair
    source, target = bytes_of(0, 1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    ours.register([region(source)])
    theirs.register([region(target[: 1 << 19]), region(target[1 << 19 :])])
    peer = ours.meet(theirs.describe())
    half, size = 1 << 19, 1000
    writes = [
        Write(source.data_ptr() + start, target.data_ptr() + start, size) for start in range(0, half - size, 2 * size)
    ]
    with Progress(theirs):
        ours.write(peer, writes, go_on)
    expected = torch.zeros_like(target)
    for start in range(0, half - size, 2 * size):
        expected[start : start + size] = source[start : start + size]
    assert torch.equal(target, expected)


def test_memory_registered_later_is_reached_once_it_was_described_again(pair):
    ours, theirs = pair
    source = bytes_of(1, 4096)
    ours.register([region(source)])
    targets = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]
    names = set()
    for target in targets:
        theirs.register([region(target)])
        if names:
            ours.forget(*names)
        names = {ours.meet(theirs.describe())}
        with Progress(theirs):
            ours.write(*names, [Write(source.data_ptr(), target.data_ptr(), 4096)], go_on)
        assert torch.equal(source, target)
    theirs.unregister([region(targets[0])])
    ours.forget("nobody")


def test_memory_that_is_not_registered_is_not_written(pair):
    ours, theirs = pair
    source, target = bytes_of(2, 4096), torch.zeros(8192, dtype=torch.uint8)
    ours.register([region(source)])
    theirs.register([region(target[:4096])])
    peer = ours.meet(theirs.describe())
    with Progress(theirs), pytest.raises(FabricError):
        ours.write(peer, [Write(source.data_ptr(), target.data_ptr() + 4096, 4096)], go_on)
    assert not target.any()


@pytest.mark.parametrize("kind", [FabricKind.MEMORY, pytest.param(FabricKind.NIXL, marks=pytest.mark.p2p)])
def test_a_write_that_gets_no_answer_ends_when_it_is_told_to(kind):
    """Mooncake's calls are bounded in size instead; they cannot be stopped."""
    require(kind)
    ours, theirs = (FABRICS[kind]("127.0.0.1") for _ in range(2))
    source, target = bytes_of(3, 4096), torch.zeros(4096, dtype=torch.uint8)
    ours.register([region(source)])
    theirs.register([region(target)])
    if kind is FabricKind.MEMORY:
        ours.faults = FabricFaults(slow_s=60)
    until = time.monotonic() + 0.1
    with pytest.raises(FabricError, match="enough"):
        ours.write(
            ours.meet(theirs.describe()),
            [Write(source.data_ptr(), target.data_ptr(), 4096)],
            lambda: "enough" if time.monotonic() > until else None,
        )
    ours.close()
    theirs.close()


def test_one_that_has_left_is_a_failure(pair):
    ours, theirs = pair
    source, target = bytes_of(4, 4096), torch.zeros(4096, dtype=torch.uint8)
    ours.register([region(source)])
    theirs.register([region(target)])
    peer = ours.meet(theirs.describe())
    theirs.close()
    until = time.monotonic() + 5
    with pytest.raises(FabricError):
        ours.write(
            peer,
            [Write(source.data_ptr(), target.data_ptr(), 4096)],
            lambda: "it is late" if time.monotonic() > until else None,
        )


def test_overlapping_memory_is_refused_by_the_fake():
    fabric = FABRICS[FabricKind.MEMORY]("127.0.0.1")
    fabric.register([Region(100, 50)])
    with pytest.raises(FabricError, match="overlaps"):
        fabric.register([Region(120, 10)])
    with pytest.raises(FabricError, match=r"sync.p2p.fabric"):
        fabric.meet(b"elsewhere []")


@pytest.mark.p2p
@pytest.mark.parametrize("kind", LIBRARIES)
def test_versions_travel_by_the_real_library_through_an_inbox(kind):
    require(kind)
    transport = PeerTransport.open(PeerConfig(fabric=kind), 30.0)
    inbox = Inbox(ENGINE)
    sets = [{name: torch.zeros_like(tensor) for name, tensor in model().items()} for _ in range(2)]
    try:
        before = None
        for number in range(4):
            manifest = build_manifest(number, 1, before, model(number))
            transport.hold(manifest, model(number))
            source = transport.offer(manifest.version, [ENGINE])
            moved = asyncio.run(inbox.receive(manifest, source, sets[number % 2], None))
            assert moved == manifest.size_bytes
            assert digest(sets[number % 2]) == manifest.version.digest
            if before is not None:
                transport.release(before)
            before = manifest.version
    finally:
        inbox.close()
        transport.close()


@pytest.mark.p2p
@pytest.mark.parametrize("kind", LIBRARIES)
def test_sharded_ranks_in_processes_of_their_own_serve_a_sharded_engine_and_one_that_dies_is_named(kind):
    require(kind)
    processes = [
        subprocess.Popen(
            [sys.executable, "source_rank.py", kind, str(rank), ENGINE],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    receiver = ShardedReceiver(ENGINE, model(), TENSOR)
    try:
        ranks = tuple(msgspec.json.decode(process.stdout.readline(), type=PeerRank) for process in processes)
        source = PeerSource(fabric=kind, engines=(ENGINE,), ranks=ranks, timeout_s=20.0)
        manifest = build_manifest(0, 1, None, model())
        for _ in range(2):
            asyncio.run(receiver.stage(manifest, source))
            assert asyncio.run(receiver.verify()).digest == manifest.version.digest
        asyncio.run(receiver.commit(manifest.version, None))
        assert_holds(receiver, TENSOR, model())
        processes[1].kill()
        processes[1].wait()
        with pytest.raises(EngineError, match="source rank 1"):
            asyncio.run(receiver.stage(manifest, source))
        assert_holds(receiver, TENSOR, model())
        processes[0].communicate(timeout=20)
        assert processes[0].returncode == 0
    finally:
        receiver.close()
        for process in processes:
            process.kill()
            process.communicate()


LEAVE = """
import sys
from fathom.config.families import FabricKind
from fathom.sync.transports.p2p.fabrics import FABRICS
fabric = FABRICS[FabricKind(sys.argv[1])]("127.0.0.1")
print("open")
"""


@pytest.mark.p2p
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_process_that_left_it_open_ends_well_and_its_output_is_its_own(kind):
    require(kind)
    done = subprocess.run([sys.executable, "-c", LEAVE, kind], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "open\n"), done.stderr


class Absent:
    """Lets no module of some names be imported."""

    def __init__(self, name: str, error: type[ImportError]):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.name:
            raise self.error(f"libibverbs.so.1: cannot open shared object file ({name})")


@pytest.mark.parametrize(
    ("kind", "module", "error", "raised", "named"),
    [
        (FabricKind.NIXL, "nixl_cu12", ModuleNotFoundError, MissingDependencyError, r"fathom-rl\[nixl\]"),
        (FabricKind.MOONCAKE, "mooncake", ModuleNotFoundError, MissingDependencyError, r"fathom-rl\[mooncake\]"),
        (FabricKind.MOONCAKE, "mooncake", ImportError, ConfigError, "apt-get install .*libibverbs1"),
    ],
)
def test_what_is_not_installed_is_named_with_option_and_remedy(monkeypatch, kind, module, error, raised, named):
    for loaded in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Absent(module, error), *sys.meta_path])
    importlib.invalidate_caches()
    with pytest.raises(raised, match=named) as caught:
        FABRICS[kind]("127.0.0.1")
    assert f"sync.p2p.fabric = '{kind}'" in str(caught.value)
