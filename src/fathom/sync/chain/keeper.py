"""Keeps the chain beside a run, whatever the transport: the trainer waits for a copy, a thread does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from fathom.core.errors import DeliveryError
from fathom.core.manifest import Manifest
from fathom.sync.chain.writer import ChainWriter, Trouble
from fathom.sync.digest import copy_bytes, shaped


@final
class Keeper:
    """Appends every version to a chain, one behind at most.

    It never stops a run: a medium that fails is reported once, and again only after it has worked in between. The
    first version after a failure is an anchor.
    """

    def __init__(self, writer: ChainWriter, trouble: Trouble, timeout_s: float) -> None:
        """The version before is waited for at most `timeout_s`; one that comes too early then is not kept."""
        self._writer = writer
        self._trouble = trouble
        self._timeout_s = timeout_s
        self._failing = False
        self._late = False
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._appending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chain")

    def keep(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Take a copy; afterwards `tensors` may change. Blocks, and never raises."""
        try:
            if self._wait():
                self._appending = self._thread.submit(self._append, manifest, self._copy(manifest, tensors))
            else:
                raise DeliveryError(
                    f"{manifest.version.name} is not kept: the version before was not written within "
                    f"{self._timeout_s:g} s; look at the medium of sync.chain.store"
                )
        except Exception as error:  # noqa: BLE001 - the boundary: the run goes on without its chain
            self._report(error)

    def close(self) -> None:
        """Finish what is under way, as far as the deadline allows. Idempotent."""
        if not self._wait():
            self._report(DeliveryError(f"the last version was not kept within {self._timeout_s:g} s"))
        self._thread.shutdown(wait=False)

    def _wait(self) -> bool:
        """True: nothing is under way. What was late already is not waited for again."""
        if self._appending is not None:
            try:
                self._appending.result(0 if self._late else self._timeout_s)
            except TimeoutError:
                self._late = True
                return False
        self._appending, self._late = None, False
        return True

    def _copy(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Into memory that is used again: its first touch costs far more than a copy."""
        last = manifest.tensors[-1]
        if len(self._memory) != last.offset + last.size_bytes:
            self._memory = torch.empty(last.offset + last.size_bytes, dtype=torch.uint8)
        copies: dict[str, Tensor] = {}
        for entry in manifest.tensors:
            place = shaped(self._memory[entry.offset : entry.offset + entry.size_bytes], entry)
            copy_bytes(tensors[entry.name].detach().contiguous(), place)
            copies[entry.name] = place
        return copies

    def _append(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        try:
            self._writer.append(manifest, tensors)
        except Exception as error:  # noqa: BLE001 - the boundary, as above
            self._report(error)
        else:
            self._failing = False

    def _report(self, error: Exception) -> None:
        if not self._failing:
            self._trouble(error)
        self._failing = True
