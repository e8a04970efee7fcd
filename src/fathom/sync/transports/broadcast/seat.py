"""An engine's place in broadcasts."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from fathom.core.errors import EngineError, TransferInterruptedError
from fathom.core.ids import EngineId
from fathom.core.manifest import BroadcastSource
from fathom.sync.digest import byte_view, copy_bytes
from fathom.sync.transports.broadcast.buckets import UNDER_WAY, Bucket, plan_buckets
from fathom.sync.transports.broadcast.group import BrokenGroupError, Group, Pending, device_name, form_gloo, form_nccl
from fathom.sync.transports.broadcast.roll_call import (
    Present,
    Verdict,
    await_verdict,
    say_present,
    why_broken,
    withdraw,
)
from fathom.sync.transports.broadcast.store import StoreVisit, visit_store
from fathom.sync.transports.reception import Reception

_GRACE_S = 1.0
"""The sender decides within `stall_s`; its word may take a moment."""


@final
class Seat:
    """Keeps the connection to the sender and the group from one transfer to the next. One transfer at a time."""

    def __init__(self, engine: EngineId) -> None:
        self._engine = engine
        self._address: tuple[str, int] | None = None
        self._visit: StoreVisit | None = None
        self._group: Group | None = None
        self._slots: list[Tensor] = []

    def receive(self, source: BroadcastSource, reception: Reception) -> int:
        """Take part in the transfer; returns the bytes that came. When given up it ends at once while it waits for
        others, and with the buckets under way, `stall_s` at the latest, once bytes travel.

        Raises:
            TransferInterruptedError: another member did not come, died or stalled.
            EngineError: this engine is not one of those that the source is for.
        """
        rank = source.ranks.get(self._engine)
        if rank is None:
            raise EngineError(self._engine, f"the offer is for {sorted(source.ranks)}; stage what was offered to it")
        try:
            group = self._take_seat(source, rank, reception)
        except TimeoutError as error:
            raise TransferInterruptedError(self._engine, str(error)) from error
        except (OSError, RuntimeError) as error:  # of the store; what comes from elsewhere is typed
            self.close()
            raise TransferInterruptedError(self._engine, f"the sender cannot be reached: {error}") from error
        except BrokenGroupError as error:
            raise TransferInterruptedError(self._engine, f"the broadcast did not begin: {error}") from error
        return 0 if group is None else self._take(group, source, reception)

    def close(self) -> None:
        """Leave the group and the store. Idempotent."""
        self._leave_group()
        self._visit = self._address = None
        self._slots = []

    def _take_seat(self, source: BroadcastSource, rank: int, reception: Reception) -> Group | None:
        """Be there, and hear the verdict. None: given up."""
        visit = self._connect(source)
        transfer = PrefixStore(source.transfer, visit.store)
        device = reception.into[reception.manifest.tensors[0].name].device
        kept = self._group.name if self._group else None
        say_present(transfer, rank, Present(group=kept, device=device_name(device)))
        verdict = await_verdict(transfer, source.stall_s + _GRACE_S, reception.given_up)
        if verdict is None:
            with suppress(RuntimeError):  # the sender is gone too
                withdraw(transfer, rank)
            return None
        if verdict.group is None:
            raise TransferInterruptedError(self._engine, f"the broadcast did not begin: {verdict.reason}")
        return self._sit_down(verdict, source, rank, visit, device)

    def _connect(self, source: BroadcastSource) -> StoreVisit:
        address = (source.host, source.port)
        if self._visit is None or self._address != address:
            self.close()
            self._visit, self._address = visit_store(*address), address
        return self._visit

    def _sit_down(
        self, verdict: Verdict, source: BroadcastSource, rank: int, visit: StoreVisit, device: torch.device
    ) -> Group:
        assert verdict.group is not None
        if not verdict.form:
            if self._group is None or self._group.name != verdict.group:
                raise BrokenGroupError("this engine does not hold the group that the sender names")
            return self._group
        self._leave_group()
        size = len(source.ranks) + 1
        if verdict.backend == "nccl":
            self._group = form_nccl(verdict.group, visit.store, rank, size, device, source.stall_s)
        else:
            self._group = form_gloo(verdict.group, visit.store, rank, size, visit.address, source.stall_s)
        return self._group

    def _take(self, group: Group, source: BroadcastSource, reception: Reception) -> int:
        """Receive bucket after bucket."""
        under_way: deque[_Arrival] = deque()
        moved_bytes, whole = 0, False
        try:
            for bucket in plan_buckets(reception.manifest, source.bucket_bytes):
                if len(under_way) == UNDER_WAY:
                    moved_bytes += under_way.popleft().land(reception)
                if reception.given_up.is_set():
                    return moved_bytes
                memory = self._memory(group, bucket, source.bucket_bytes, reception)
                under_way.append(_Arrival(bucket, memory, group.broadcast(memory)))
            while under_way:
                moved_bytes += under_way.popleft().land(reception)
            whole = True
            return moved_bytes
        except BrokenGroupError as error:
            reason = self._why_broken(source) or error
            raise TransferInterruptedError(self._engine, f"the broadcast broke off: {reason}") from error
        finally:
            for arrival in under_way:  # nothing may be written once this returns
                arrival.sink()
            if not whole:
                self._leave_group()

    def _memory(self, group: Group, bucket: Bucket, bucket_bytes: int, reception: Reception) -> Tensor:
        """Where a bucket is received: in the tensor itself where it is alone in the bucket, or beside it."""
        if len(bucket.pieces) == 1:
            piece = bucket.pieces[0]
            tensor = reception.into[piece.entry.name]
            if tensor.device == group.device:
                return byte_view(tensor)[piece.start : piece.stop]
        if not self._slots or self._slots[0].device != group.device or len(self._slots[0]) != bucket_bytes:
            self._slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device) for _ in range(UNDER_WAY)]
        self._slots.reverse()  # of two under way, the other one is free
        return self._slots[0][: bucket.size_bytes]

    def _why_broken(self, source: BroadcastSource) -> str | None:
        assert self._visit is not None
        with suppress(RuntimeError):  # the sender is gone
            return why_broken(PrefixStore(source.transfer, self._visit.store))

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@final
class _Arrival:
    """A bucket under way to its memory."""

    def __init__(self, bucket: Bucket, memory: Tensor, pending: Pending) -> None:
        self._bucket = bucket
        self._memory = memory
        self._pending = pending

    def land(self, reception: Reception) -> int:
        """Wait for it and copy what does not lie in its place; returns its bytes. Raises `BrokenGroupError`."""
        self._pending.wait()
        for piece in self._bucket.pieces:
            if reception.given_up.is_set():
                break
            arrived = self._memory[self._bucket.place(piece)]
            place = byte_view(reception.into[piece.entry.name])[piece.start : piece.stop]
            if arrived.data_ptr() != place.data_ptr():
                copy_bytes(arrived, place)
        return self._bucket.size_bytes

    def sink(self) -> None:
        """Wait until it writes no more, whatever came."""
        with suppress(BrokenGroupError):
            self._pending.wait()
