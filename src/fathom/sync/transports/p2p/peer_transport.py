"""Weights written from the trainer's memory into that of each engine rank, by a fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Self, final

from torch import Tensor

from fathom.config.sync import PeerConfig
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, PeerSource
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.fabrics import FABRICS
from fathom.sync.transports.p2p.held import Slice
from fathom.sync.transports.p2p.plan import Holding
from fathom.sync.transports.p2p.sender import Sender

_ENGINE_SHARE, _SENDER_SHARE = 0.9, 0.8
"""Shares of the deadline of a stage after which an engine, and before it a source, give up and say what is missing."""


@final
class PeerTransport:
    """Source ranks within the trainer's process: one that holds everything, or several that hold slices."""

    def __init__(self, fabric: str, senders: Sequence[Sender], timeout_s: float, layout: Sequence[Holding]) -> None:
        """`layout` says what each of the senders holds; together they must hold everything."""
        self._fabric = fabric
        self._senders = senders
        self._timeout_s = timeout_s
        self._layout = layout

    @classmethod
    def open(cls, config: PeerConfig, timeout_s: float, layout: Sequence[Holding] = (None,)) -> Self:
        """With sockets and fabrics of its own. A stage may take `timeout_s`.

        Raises:
            ConfigError: the fabric is not installed or does not start, or nothing can listen at the address.
        """
        senders: list[Sender] = []
        with ExitStack() as opened:
            for _ in layout:
                fabric = opened.enter_context(closing(FABRICS[config.fabric](config.host)))
                senders.append(Sender(fabric, config.host, config.port, timeout_s * _SENDER_SHARE))
                opened.callback(senders[-1].close)
            opened.pop_all()  # nothing is closed when all could be opened
        return cls(config.fabric, senders, timeout_s * _ENGINE_SHARE, layout)

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, each sender its slices, into registered memory."""
        for sender, holding in zip(self._senders, self._layout, strict=True):
            if holding is None:
                held = {name: Slice(box=Box.whole(tensor.shape), tensor=tensor) for name, tensor in tensors.items()}
            else:
                held = {name: Slice(box=box, tensor=tensors[name][box.slices]) for name, box in holding.items()}
            sender.hold(manifest, held)

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> PeerSource:
        """Let these engines ask. What an earlier offer began has ended."""
        ranks = [
            sender.offer(version, engines, whole=holding is None)
            for sender, holding in zip(self._senders, self._layout, strict=True)
        ]
        return PeerSource(fabric=self._fabric, engines=tuple(engines), ranks=tuple(ranks), timeout_s=self._timeout_s)

    def release(self, version: PolicyVersion) -> None:
        """Keep the memory, for a later version to be copied into."""
        with ExitStack() as each:  # one whose write is stuck does not keep the others from it
            for sender in self._senders:
                each.callback(sender.release, version)

    def close(self) -> None:
        """End the sockets and the fabrics. Idempotent."""
        with ExitStack() as each:
            for sender in self._senders:
                each.callback(sender.close)
