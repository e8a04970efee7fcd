"""Sources and receiving ranks in one process, over the fabric that ships for it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fathom.config.families import FabricKind
from fathom.config.sync import PeerConfig
from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, PeerSource
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.fabrics.memory_fabric import FabricFaults, MemoryFabric
from fathom.sync.transports.p2p.held import Slice
from fathom.sync.transports.p2p.landing import Landing
from fathom.sync.transports.p2p.peer_transport import PeerTransport
from fathom.sync.transports.p2p.plan import Holding
from fathom.sync.transports.p2p.sender import Sender

ENGINE, OTHER = EngineId("a"), EngineId("b")


def never() -> bool:
    return False


def model(seed: int = 0) -> dict[str, Tensor]:
    """Layers, an expert stack, experts of their own, a scalar, an empty tensor: three element types."""
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(10, 6, generator=random).bfloat16(),
        "q": torch.randn(8, 6, generator=random),
        "o": torch.randn(6, 8, generator=random).t().contiguous(),
        "experts": torch.randn(4, 3, 6, generator=random),
        "expert.0": torch.randn(3, 3, generator=random),
        "expert.1": torch.randn(3, 3, generator=random),
        "scale": torch.randn((), generator=random),
        "empty": torch.zeros(0, 3),
        "mask": torch.rand(7, generator=random) < 0.5,
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model().items()}


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Slice]:
    return {name: Slice(box=Box.whole(tensor.shape), tensor=tensor) for name, tensor in tensors.items()}


class Side:
    """A transport whose fabrics a test can reach."""

    def __init__(self, layout: Sequence[Holding], timeout_s: float, faults: FabricFaults) -> None:
        self.fabrics = [MemoryFabric(faults) for _ in layout]
        self.senders = [Sender(fabric, "127.0.0.1", 0, timeout_s) for fabric in self.fabrics]
        self.transport = PeerTransport(FabricKind.MEMORY, self.senders, timeout_s + 5, layout)

    def send(self, manifest: Manifest, tensors: Mapping[str, Tensor], *engines: EngineId) -> PeerSource:
        self.transport.hold(manifest, tensors)
        return self.transport.offer(manifest.version, engines or (ENGINE,))


@contextmanager
def sending(
    layout: Sequence[Holding] = (None,), timeout_s: float = 20.0, faults: FabricFaults | None = None
) -> Iterator[Side]:
    side = Side(layout, timeout_s, faults or FabricFaults())
    try:
        yield side
    finally:
        side.transport.close()


@contextmanager
def landing(engine: EngineId = ENGINE, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Landing, list[MemoryFabric]]]:
    """A receiving rank, and every fabric it opens."""
    opened: list[MemoryFabric] = []

    def open_fabric(host: str) -> MemoryFabric:
        opened.append(MemoryFabric())
        return opened[-1]

    rank_ = Landing(engine, rank, ranks, {FabricKind.MEMORY: open_fabric})
    try:
        yield rank_, opened
    finally:
        rank_.close()


def config() -> PeerConfig:
    return PeerConfig(fabric=FabricKind.MEMORY)
