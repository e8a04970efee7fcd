"""Who takes part in a transfer, agreed on through the trainer's key-value store before a byte travels.

**The wire contract.** The trainer is rank 0, each engine of the offer has the rank that `BroadcastSource.ranks` says.
The store is a `torch.distributed.TCPStore` at `host:port`; the keys of one transfer are below its unguessable name
(`PrefixStore(source.transfer, store)`); values are JSON.

1. Each engine sets `present/<rank>` to `{"type": "present.1", "group": G, "device": D}`. G is the name of the process
   group it still holds from an earlier transfer, or null. D is `"cpu"`, or `"cuda:"` and the GPU's UUID, for the memory
   it receives into. An engine that leaves before the verdict deletes its key.
2. The trainer waits for all of them, at most `stall_s` after the offer, then sets `verdict` to
   `{"type": "verdict.1", "group": G, "form": F, "backend": B, "reason": R}`. With R not null there is no transfer and
   R says why: raise `TransferInterruptedError`. Else all use the group G; where F is true they form it now.
3. A group is `ProcessGroupGloo(PrefixStore(G, store), rank, len(ranks) + 1, options)`, with one device at the address
   by which the member reaches the store, connected at once (`lazy_init=False`), and a time-out of `stall_s`; or
   `ProcessGroupNCCL` where B is `"nccl"`. It is kept until the next verdict names another one.
4. For every bucket of `plan_buckets(manifest, source.bucket_bytes)`, in that order: `broadcast` of uint8
   [bucket.size_bytes] from rank 0, each within `stall_s`. Several may be under way at once; their order is fixed.
5. Whoever breaks off lets go of the group, which breaks it for the others: they raise `TransferInterruptedError`, let
   go of it too, and say `"group": null` next time. The trainer sets `broken` to its reason before.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from threading import Event
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import Store

_FIRST_LOOK_S = 0.0002
_LONGEST_LOOK_S = 0.005

T = TypeVar("T")


class Present(msgspec.Struct, frozen=True, tag="present.1"):
    """An engine is there."""

    group: str | None
    """The group it still holds. None: none."""
    device: str
    """Where it receives: `cpu`, or `cuda:` and the UUID of the GPU."""


class Verdict(msgspec.Struct, frozen=True, tag="verdict.1"):
    """How the transfer goes on."""

    group: str | None = None
    """Name of the group. None: there is no transfer."""
    form: bool = False
    """The group does not exist yet."""
    backend: str = "gloo"
    """`gloo` or `nccl`."""
    reason: str | None = None
    """Why there is no transfer. None: there is one."""


_VERDICT_KEY = "verdict"
_BROKEN_KEY = "broken"


def say_present(store: Store, rank: int, present: Present) -> None:
    """An engine's first word."""
    store.set(_present_key(rank), msgspec.json.encode(present).decode())


def withdraw(store: Store, rank: int) -> None:
    """Take it back."""
    store.delete_key(_present_key(rank))


def await_all(store: Store, ranks: Collection[int], within_s: float, given_up: Event) -> tuple[int, ...]:
    """Wait until all these engines are there; returns those that are not after `within_s`, or when given up."""
    deadline, pause_s = time.monotonic() + within_s, _FIRST_LOOK_S
    while missing := tuple(rank for rank in ranks if not store.check([_present_key(rank)])):
        if given_up.wait(pause_s) or time.monotonic() > deadline:
            break
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    return missing


def read_present(store: Store, rank: int) -> Present:
    """What an engine that is there has said."""
    return msgspec.json.decode(store.get(_present_key(rank)), type=Present)


def give_verdict(store: Store, verdict: Verdict) -> None:
    """The trainer's word."""
    store.set(_VERDICT_KEY, msgspec.json.encode(verdict).decode())


def await_verdict(store: Store, within_s: float, given_up: Event) -> Verdict | None:
    """Wait for the trainer's word. None: given up.

    Raises:
        TimeoutError: there is none.
    """
    deadline, pause_s = time.monotonic() + within_s, _FIRST_LOOK_S
    while not store.check([_VERDICT_KEY]):
        if given_up.wait(pause_s):
            return None
        if time.monotonic() > deadline:
            raise TimeoutError(f"the trainer did not begin within {within_s:g} s")
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    return msgspec.json.decode(store.get(_VERDICT_KEY), type=Verdict)


def say_broken(store: Store, reason: str) -> None:
    """The trainer breaks off."""
    store.set(_BROKEN_KEY, reason)


def why_broken(store: Store) -> str | None:
    """Why the trainer broke off. None: it has not said."""
    return store.get(_BROKEN_KEY).decode() if store.check([_BROKEN_KEY]) else None


def forget(store: Store, ranks: Collection[int]) -> None:
    """Remove the keys of a transfer that is over."""
    for key in (*map(_present_key, ranks), _VERDICT_KEY, _BROKEN_KEY):
        store.delete_key(key)


def _present_key(rank: int) -> str:
    return f"present/{rank}"
