"""A version held and offered in one go, as most tests want it."""

from collections.abc import Mapping

from torch import Tensor

from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, WeightSource
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.transport import Transport

ENGINE = EngineId("a")


def hold_and_offer(transport: Transport, manifest: Manifest, tensors: Mapping[str, Tensor]) -> WeightSource:
    transport.hold(manifest, tensors)
    return transport.offer(manifest.version, [ENGINE])


async def receive(source: WeightSource, manifest: Manifest, into: Mapping[str, Tensor], faults=None) -> int:
    inbox = Inbox(ENGINE) if faults is None else Inbox(ENGINE, faults)
    try:
        return await inbox.receive(manifest, source, into, None)
    finally:
        inbox.close()
