"""Machines joined by slow links, on one machine: network namespaces, a bridge, token buckets. Needs root and Linux.

    namespace 0 ---- link ----+
    namespace 1 ---- link ----+-- bridge (a namespace of its own)
    namespace 2 ---- link ----+

Every link lets through so many bits a second each way, as a network card would. Addresses exist inside the namespaces
alone; nothing outside them is touched, and all is gone when the context ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fathom.core.errors import ConfigError

LINK = "eth0"
"""What a machine's end of its link is called."""
_PREFIX = "fathom-bench-"
_CALL_S = 10.0
_QUEUE_MS = 50
_BURSTS_A_SECOND = 250
_LEAST_BURST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A namespace that plays one."""

    namespace: str
    """Its name."""
    host: str
    """Its address on the network."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Comes before a command line to run it there."""
        return ("ip", "netns", "exec", self.namespace)


def why_not() -> str | None:
    """What this machine lacks. None: networks can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing; install iproute2"
    try:
        with slow_network(1, 1000):
            return None
    except ConfigError as error:
        return str(error)


@contextmanager
def slow_network(machines: int, mbit_per_s: float) -> Generator[list[Machine]]:
    """So many machines, each at a link of this speed. Raises ConfigError when the system refuses."""
    _remove_orphans()
    own = f"{_PREFIX}{os.getpid()}-"
    bridge = f"{own}bridge"
    made = [Machine(namespace=f"{own}{index}", host=f"10.77.0.{index + 1}") for index in range(machines)]
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for index, machine in enumerate(made):
            _connect(machine, bridge, f"port{index}", mbit_per_s)
        yield made
    finally:
        _remove(name for name in _namespaces() if name.startswith(own))


def _connect(machine: Machine, bridge: str, port: str, mbit_per_s: float) -> None:
    inside = machine.namespace
    _ip("netns", "add", inside)
    _ip("link", "add", LINK, "netns", inside, "type", "veth", "peer", "name", port, "netns", bridge)
    _ip("-n", inside, "addr", "add", f"{machine.host}/24", "dev", LINK)
    for link in ("lo", LINK):
        _ip("-n", inside, "link", "set", link, "up")
    _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
    for namespace, link in ((inside, LINK), (bridge, port)):
        burst = max(_LEAST_BURST_BYTES, int(mbit_per_s * 1e6 / 8 / _BURSTS_A_SECOND))
        speed = ("rate", f"{mbit_per_s:g}mbit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms")
        _run(("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *speed))


def _remove_orphans() -> None:
    """Those of processes that were killed."""
    for name in _namespaces():
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{owner}"):
            _remove([name])


def _remove(names: Iterable[str]) -> None:
    for name in names:
        _ip("netns", "del", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _ip(*arguments: str) -> str:
    return _run(("ip", *arguments))


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)}: {error.stderr.strip()}; leave the network out of `parts`") from error
    except OSError as error:
        raise ConfigError(f"{' '.join(command)}: {error}; leave the network out of `parts`") from error
    return done.stdout
