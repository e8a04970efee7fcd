"""One attempt to bring a version to the engines of an offer, in a thread of its own."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import is_nccl_available

from fathom.config.families import CollectiveBackend
from fathom.config.sync import BroadcastConfig
from fathom.core.errors import DeliveryError
from fathom.core.ids import EngineId
from fathom.core.manifest import BroadcastSource
from fathom.sync.transports.broadcast.bucket_source import BucketSource, DeviceBuckets
from fathom.sync.transports.broadcast.buckets import UNDER_WAY, Bucket
from fathom.sync.transports.broadcast.group import BrokenGroupError, Group, Pending, device_name, form_gloo, form_nccl
from fathom.sync.transports.broadcast.roll_call import (
    Present,
    Verdict,
    await_all,
    give_verdict,
    read_present,
    say_broken,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A group that has not broken, and who is in it."""

    group: Group
    """The group."""
    engines: tuple[EngineId, ...]
    """By rank, from 1."""


@final
class Sending:
    """Waits for the engines, then sends. It ends by itself, `stall_s` after the last progress at the latest."""

    def __init__(
        self,
        source: BroadcastSource,
        store: Store,
        buckets: Sequence[Bucket],
        bytes_of: BucketSource,
        device: torch.device,
        kept: Kept | None,
        config: BroadcastConfig,
    ) -> None:
        """`device` is where the trainer's tensors lie; `kept` the group of the last transfer, now owned by this one."""
        self._source = source
        self._store = store
        self._transfer = PrefixStore(source.transfer, store)
        self._buckets = buckets
        self._bytes_of = bytes_of
        self._device = device
        self._kept = kept
        self._config = config
        self._engines = tuple(sorted(source.ranks, key=source.ranks.__getitem__))
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broadcast")
        self._thread.start()

    def give_up(self) -> Kept | None:
        """Stop, if it still runs; returns the group, if it is whole. Idempotent."""
        self._given_up.set()
        self._thread.join()
        return self._kept

    def _run(self) -> None:
        verdict_given = False
        try:
            missing = await_all(self._transfer, self._source.ranks.values(), self._config.stall_s, self._given_up)
            if missing:
                names = ", ".join(self._engines[rank - 1] for rank in missing)
                late = f"{names} did not come within {self._config.stall_s:g} s (sync.broadcast.stall_s)"
                raise DeliveryError("it was given up" if self._given_up.is_set() else late)
            verdict = self._decide()
            give_verdict(self._transfer, verdict)
            verdict_given = True
            if verdict.form:
                self._form(verdict)
            self._send()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: engines are told, or notice the broken group
            with suppress(RuntimeError):  # the store is gone, and the engines with it
                if verdict_given:
                    say_broken(self._transfer, str(error))
                else:
                    give_verdict(self._transfer, Verdict(reason=str(error)))
            if verdict_given:
                self._let_go()

    def _decide(self) -> Verdict:
        present = [read_present(self._transfer, rank) for rank in self._source.ranks.values()]
        backend = self._backend(present)
        kept = self._kept
        if kept and kept.engines == self._engines and all(each.group == kept.group.name for each in present):
            return Verdict(group=kept.group.name, backend=backend)
        return Verdict(group=secrets.token_hex(16), form=True, backend=backend)

    def _backend(self, present: Sequence[Present]) -> str:
        """NCCL needs a GPU for each member, to itself."""
        devices = [device_name(self._device), *(each.device for each in present)]
        own_gpus = "cpu" not in devices and len(set(devices)) == len(devices) and is_nccl_available()
        if self._config.backend is CollectiveBackend.NCCL and not own_gpus:
            raise DeliveryError(
                f"sync.broadcast.backend = 'nccl' needs a GPU of its own for each, found {devices}; set it to 'gloo'"
            )
        return "nccl" if own_gpus and self._config.backend is not CollectiveBackend.GLOO else "gloo"

    def _form(self, verdict: Verdict) -> None:
        assert verdict.group is not None
        self._let_go()
        size, stall_s = len(self._engines) + 1, self._config.stall_s
        if verdict.backend == "nccl":
            group: Group = form_nccl(verdict.group, self._store, 0, size, self._device, stall_s)
        else:
            group = form_gloo(verdict.group, self._store, 0, size, self._config.host, stall_s)
        self._kept = Kept(group=group, engines=self._engines)

    def _send(self) -> None:
        assert self._kept is not None
        group, fill = self._kept.group, self._bytes_of.fill
        if group.device.type != "cpu":
            fill = DeviceBuckets(self._bytes_of, group.device, self._source.bucket_bytes).fill
        under_way: deque[Pending] = deque()
        try:
            for bucket in self._buckets:
                if len(under_way) == UNDER_WAY:
                    under_way.popleft().wait()
                if self._given_up.is_set():
                    raise BrokenGroupError("it was given up")
                under_way.append(group.broadcast(fill(bucket)))
            while under_way:
                under_way.popleft().wait()
        finally:
            for pending in under_way:  # nothing may read the version once this has ended
                with suppress(BrokenGroupError):
                    pending.wait()

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.group.close()
            self._kept = None
