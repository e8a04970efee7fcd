"""A process group of the trainer and some engines, without torch's default group: a process may be in several."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, Work

from fathom.core.errors import FathomError

_POLL_S = 0.0002
_NEVER = timedelta(days=7)
"""Time-out of NCCL's own watchdog, which would end the whole process: deadlines are kept here instead."""


class BrokenGroupError(FathomError):
    """A member left, died or stalled: the group is of no use any more."""


class _Members(Protocol):
    """A process group as torch makes it."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> Work: ...
    def eager_connect_single_device(self, device: torch.device | None) -> None: ...
    def abort(self) -> None: ...


class Pending(Protocol):
    """A broadcast under way."""

    def wait(self) -> None:
        """Return when this member's part is done. Raises `BrokenGroupError`."""
        ...


class Group(Protocol):
    """Members that can broadcast. Rank 0 sends."""

    @property
    def name(self) -> str:
        """Unguessable."""
        ...

    @property
    def device(self) -> torch.device:
        """Where memory must lie to be sent or received."""
        ...

    def broadcast(self, memory: Tensor) -> Pending:
        """Begin to send, or to overwrite, contiguous uint8 [size]; it must stay until `wait` has returned or raised."""
        ...

    def close(self) -> None:
        """Let go of it. Everything begun must have been waited for."""
        ...


def device_name(device: torch.device) -> str:
    """`cpu`, or `cuda:` and the GPU's UUID: the same GPU has the same name in every process."""
    return "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def form_gloo(name: str, store: Store, rank: int, size: int, address: str, stall_s: float) -> GlooGroup:
    """Connect to all members; `address` is where the others reach this one. Raises `BrokenGroupError`."""
    timeout = timedelta(seconds=stall_s)
    options: Any = cast("Any", ProcessGroupGloo)._Options()  # torch's stubs know neither these nor `broadcast`
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    try:
        members = cast("_Members", ProcessGroupGloo(PrefixStore(name, store), rank, size, options))
    except RuntimeError as error:
        raise BrokenGroupError(f"a member did not connect within {stall_s:g} s: {_first_line(error)}") from error
    return GlooGroup(name, members, timeout)


@final
class GlooGroup:
    """Host memory over TCP. Torch cannot abort such a group: what is under way ends by its time-out at the latest."""

    def __init__(self, name: str, members: _Members, timeout: timedelta) -> None:
        self._name = name
        self._members: _Members | None = members
        self._options = _from_rank_0(timeout)

    @property
    def name(self) -> str:
        """See `Group`."""
        return self._name

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def broadcast(self, memory: Tensor) -> _GlooPending:
        """See `Group`."""
        return _GlooPending(_begin(self._members, memory, self._options))

    def close(self) -> None:
        """Close its connections."""
        self._members = None


def form_nccl(name: str, store: Store, rank: int, size: int, device: torch.device, stall_s: float) -> NcclGroup:
    """The same between GPUs. Raises `BrokenGroupError`."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # a torch without CUDA has none

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    try:
        members = cast("_Members", ProcessGroupNCCL(PrefixStore(name, store), rank, size, options))
        members.eager_connect_single_device(device)
    except RuntimeError as error:
        raise BrokenGroupError(f"a GPU did not connect: {_first_line(error)}") from error
    return NcclGroup(name, members, device, stall_s)


@final
class NcclGroup:
    """GPU memory."""

    def __init__(self, name: str, members: _Members, device: torch.device, stall_s: float) -> None:
        self._name = name
        self._members: _Members | None = members
        self._device = device
        self._stall_s = stall_s
        self._options = _from_rank_0(_NEVER)

    @property
    def name(self) -> str:
        """See `Group`."""
        return self._name

    @property
    def device(self) -> torch.device:
        """This member's GPU."""
        return self._device

    def broadcast(self, memory: Tensor) -> _NcclPending:
        """See `Group`."""
        assert self._members is not None, "a closed group is used no more"
        return _NcclPending(_begin(self._members, memory, self._options), self._members, self._stall_s)

    def close(self) -> None:
        """Free the communicator."""
        if self._members is not None:
            self._members.abort()
            self._members = None


@final
class _GlooPending:
    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise BrokenGroupError(_first_line(error)) from error
        finally:
            self._work = None  # it keeps the connections open, for as long as an error's traceback is looked at


@final
class _NcclPending:
    def __init__(self, work: Work, members: _Members, stall_s: float) -> None:
        self._work = work
        self._members = members
        self._deadline = time.monotonic() + stall_s
        self._stall_s = stall_s

    def wait(self) -> None:
        """Asks again and again: `Work.wait` only orders streams, and cannot be ended."""
        while not self._work.is_completed():
            if time.monotonic() > self._deadline:
                self._members.abort()
                raise BrokenGroupError(f"a broadcast did not end within {self._stall_s:g} s")
            time.sleep(_POLL_S)
        if not self._work.is_success():
            raise BrokenGroupError(_first_line(self._work.exception()))


def _begin(members: _Members | None, memory: Tensor, options: BroadcastOptions) -> Work:
    assert members is not None, "a closed group is used no more"
    try:
        return members.broadcast([memory], options)
    except RuntimeError as error:
        raise BrokenGroupError(_first_line(error)) from error


def _from_rank_0(timeout: timedelta) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    return options


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0]
