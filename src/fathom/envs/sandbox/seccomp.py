"""System calls that programs in a sandbox do not get: memory that no limit counts, and large parts of the kernel.

A program in Berkeley Packet Filter's language, as `bwrap --seccomp` takes it. What is left out answers *not
implemented*, so that programs fall back on something else.
"""

from __future__ import annotations

import platform
import struct

_ALLOW, _NOT_IMPLEMENTED = 0x7FFF0000, 0x00050000 | 38
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_X32 = 0x40000000
"""Numbers from here on are those of another ABI."""

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: dict[str, tuple[int, int]] = {  # on x86_64, on aarch64
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}


def filter_program() -> bytes:
    """The filter for this machine. Empty: there is none for this kind of processor."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return b""
    column = list(_MACHINES).index(machine)
    refused = [numbers[column] for numbers in _NUMBERS.values()]
    steps = [(_LOAD, 0, 0, _MACHINE_AT)]
    steps += [(_EQUAL, 0, len(refused) + 3, _MACHINES[machine])]  # else: to the last line
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, len(refused) + 1, 0, _X32)]
    steps += [(_EQUAL, len(refused) - place, 0, number) for place, number in enumerate(refused)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOT_IMPLEMENTED)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
