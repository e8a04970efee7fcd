"""Only what changed, by way of the chain of versions: through a shared folder or an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, final

from torch import Tensor

from fathom.config.sync import ChainConfig
from fathom.core.errors import ConfigError, DeliveryError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import DeltaSource, Manifest
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.chain.writer import ChainWriter, Trouble, unheard
from fathom.sync.transports.reception import Reception

_PATIENCE_S = 60.0


@final
class DeltaTransport:
    """To hold a version is to append it to the chain; engines read from there what they lack.

    What nobody waits for, the anchor that is due and what is over the budget, is done by a thread beside the run. The
    chain stays when the transport is closed: other readers have a use for it.
    """

    def __init__(self, writer: ChainWriter, trouble: Trouble = unheard) -> None:
        """`trouble` hears what goes wrong in that thread; it is tried again after the next version."""
        self._writer = writer
        self._trouble = trouble
        self._held: set[PolicyVersion] = set()
        self._settling: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chain")

    @classmethod
    def open(cls, run_folder: Path, config: ChainConfig, trouble: Trouble = unheard) -> Self:
        """The chain of the run in that folder. Raises `ConfigError` or `DeliveryError` when it cannot be reached."""
        return cls(ChainWriter(Store.of_run(run_folder, config.store), config, trouble), trouble)

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Append what changed, durably."""
        self._settled()
        self._writer.extend(manifest, tensors)
        self._held.add(manifest.version)
        self._settling = self._thread.submit(self._settle, frozenset(self._held))

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> DeltaSource:
        """The chain."""
        if version not in self._held:
            raise DeliveryError(f"{version.name} is not held; publish it again")
        return DeltaSource(store=self._writer.url, version=version)

    def release(self, version: PolicyVersion) -> None:
        """It need not be kept for engines. The newest is only given up when it failed: the next one is an anchor."""
        self._held.discard(version)
        if version == self._writer.newest:
            self._settled()
            self._writer.restart()

    def close(self) -> None:
        """End what is under way, as far as that takes no minutes. The chain stays. Idempotent."""
        try:
            self._settled(_PATIENCE_S)
        except TimeoutError:
            self._trouble(DeliveryError(f"{self._writer.url} hangs: its chain may lack its last anchor"))
        self._thread.shutdown(wait=False)
        self._held.clear()

    def _settled(self, timeout_s: float | None = None) -> None:
        """Wait until the writer is free. Raises `TimeoutError`; without a limit, that of the caller's call holds."""
        if self._settling is not None:
            self._settling.result(timeout_s)
            self._settling = None

    def _settle(self, needed: frozenset[PolicyVersion]) -> None:
        try:
            self._writer.settle(needed)
        except Exception as error:  # noqa: BLE001 - the boundary: what was published can be read all the same
            self._trouble(error)


@final
class DeltaReading:
    """The engine's side. Keeps what it has learned of a chain from one version to the next."""

    def __init__(self) -> None:
        self._readers: dict[str, ChainReader] = {}

    def read(self, source: DeltaSource, reception: Reception) -> int:
        """Rebuild the version from what serves, or from an anchor; returns the bytes read.

        Raises `PayloadError` when that cannot be done to the bit.
        """
        reader = self._readers.get(source.store) or self._open(source.store)
        return reader.materialise(source.version, reception.into, reception.serving, reception.given_up)

    def _open(self, store: str) -> ChainReader:
        try:
            self._readers[store] = ChainReader(Store.open(store))
        except ConfigError as error:  # the engine is well, and no replacement could do better
            raise PayloadError(f"the engine cannot read the chain: {error}") from error
        return self._readers[store]
