"""Runs inside vLLM's worker process: takes part in Fathom's broadcasts of weights.

It does what `fathom/sync/transports/broadcast/roll_call.py` says of an engine on the host, and imports nothing of it.
"""

# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import msgspec
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

TAG = "source.broadcast.1"
"""Tag of the source."""

_ANSWER_S = 10.0
_GRACE_S = 1.0
"""The sender decides within `stall_s`; its word may take a moment."""
_FIRST_LOOK_S = 0.0002
_LONGEST_LOOK_S = 0.005
_UNDER_WAY = 2
_Gloo: Any = ProcessGroupGloo
"""As it is: torch's own stubs lack some of its parts."""


class InterruptedTransfer(Exception):  # noqa: N818 - a word of the protocol
    """Another member did not come, died or stalled: nothing is wrong with the version, nor here."""


class Seat:
    """Keeps the connection to the sender and the group from one transfer to the next. One transfer at a time."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._store: TCPStore | None = None
        self._own_address = ""
        self._group: Any = None
        self._group_name: str | None = None

    def receive(
        self, engine: str, source: dict[str, Any], memory: torch.Tensor, buckets: list[list[int]], given_up: Event
    ) -> int:
        """Overwrite `memory` (uint8 [size of the layout]); returns the bytes that came.

        Args:
            engine: name of the engine that this worker is.
            source: a `BroadcastSource`.
            memory: where to. Nothing writes there once this has returned or raised.
            buckets: [start, stop] of each, in order.
            given_up: ends it at once while it waits for others, and with the buckets under way once bytes travel.

        Raises:
            InterruptedTransfer: the transfer broke elsewhere.
        """
        if engine not in source["ranks"]:
            raise ValueError(f"the offer is for {sorted(source['ranks'])}, not for {engine}")
        whole = False
        try:
            if not self._sit_down(source, source["ranks"][engine], given_up):
                return 0
            moved_bytes = self._take(memory, buckets, timedelta(seconds=source["stall_s"]), given_up)
            whole = not given_up.is_set()
            return moved_bytes
        except (OSError, RuntimeError) as error:  # of sockets, of the store and of the group
            reason = self._why_broken(source) or str(error).partition("\n")[0]
            self._store = None
            raise InterruptedTransfer(f"the broadcast broke off: {reason}") from error
        finally:
            if not whole:
                self._group = self._group_name = None

    def _sit_down(self, source: dict[str, Any], rank: int, given_up: Event) -> bool:
        """Be there, hear the verdict, have the group it names. False: given up."""
        store = self._connect(source["host"], source["port"])
        transfer = PrefixStore(source["transfer"], store)
        present = f"present/{rank}"
        said = {"type": "present.1", "group": self._group_name, "device": "cpu"}
        transfer.set(present, msgspec.json.encode(said).decode())
        deadline, pause_s = time.monotonic() + source["stall_s"] + _GRACE_S, _FIRST_LOOK_S
        while not transfer.check(["verdict"]):
            if given_up.wait(pause_s):
                with suppress(RuntimeError):  # the sender is gone too
                    transfer.delete_key(present)
                return False
            if time.monotonic() > deadline:
                raise InterruptedTransfer(f"the sender did not begin within {source['stall_s']:g} s")
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        verdict = msgspec.json.decode(transfer.get("verdict"))
        name = verdict["group"]
        if name is None:
            raise InterruptedTransfer(f"the broadcast did not begin: {verdict['reason']}")
        if verdict["form"]:
            self._group = self._form(name, store, rank, len(source["ranks"]) + 1, source["stall_s"])
            self._group_name = name
        elif name != self._group_name:
            raise InterruptedTransfer("this engine does not hold the group that the sender names")
        return True

    def _connect(self, host: str, port: int) -> TCPStore:
        if self._store is None or self._address != (host, port):
            self._group = self._group_name = self._store = None
            with socket.create_connection((host, port), timeout=_ANSWER_S) as probe:  # torch would try on and on
                self._own_address = probe.getsockname()[0]
            self._store = TCPStore(host, port, None, False, timedelta(seconds=_ANSWER_S), wait_for_workers=False)
            self._address = (host, port)
        return self._store

    def _why_broken(self, source: dict[str, Any]) -> str | None:
        """The sender's reason. None: it gave none, or is gone."""
        with suppress(RuntimeError):
            transfer = PrefixStore(source["transfer"], self._store) if self._store is not None else None
            if transfer is not None and transfer.check(["broken"]):
                return transfer.get("broken").decode(errors="replace")
        return None

    def _form(self, name: str, store: TCPStore, rank: int, size: int, stall_s: float) -> Any:
        self._group = None
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=stall_s)
        options._devices = [_Gloo.create_device(hostname=self._own_address, lazy_init=False)]
        return _Gloo(PrefixStore(name, store), rank, size, options)

    def _take(self, memory: torch.Tensor, buckets: list[list[int]], timeout: timedelta, given_up: Event) -> int:
        assert self._group is not None
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, timeout
        under_way: deque[Any] = deque()
        moved_bytes = 0
        try:
            for start, stop in buckets:
                if len(under_way) == _UNDER_WAY:
                    under_way.popleft().wait()
                if given_up.is_set():
                    break
                under_way.append(self._group.broadcast([memory[start:stop]], options))
                moved_bytes += stop - start
            while under_way:
                under_way.popleft().wait()
            return moved_bytes
        finally:
            for work in under_way:  # nothing may be written once this returns
                with suppress(RuntimeError):
                    work.wait()
