"""The transports that cross a network, over links of limited speed between namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from fathom.bench.options import SyncOptions
from fathom.bench.record import Say
from fathom.bench.rig.fleet.receiver_process import quiet_environment
from fathom.bench.rig.network import LINK, slow_network, why_not
from fathom.bench.workloads.sync.answer import PartAnswer
from fathom.bench.workloads.sync.fleet import FleetRequest, Node
from fathom.bench.workloads.sync.names import NETWORK_RECEIVERS, link_name
from fathom.config.families import TransportKind

_CROSSING = ("broadcast", "p2p")
_INSIDE = "fathom.bench.workloads.sync.inside"
_DEADLINE_S = 600.0
_OVER_THE_LINK = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": LINK}
"""Or NIXL goes around the link: processes in two namespaces share the memory of the machine all the same."""


def measure_network(options: SyncOptions, folder: Path, say: Say) -> PartAnswer:
    """One fleet for each speed of a link. Says in a note when this machine cannot have any."""
    reason = why_not()
    crossing = tuple(transport for transport in options.transports if transport in _CROSSING)
    if reason is not None or not crossing:
        note = f"network: not measured: {reason or 'no transport that crosses one was asked for'}"
        say(note)
        return PartAnswer(samples=(), notes=(note,))
    answers = [_over(options, crossing, folder, mbit_per_s, say) for mbit_per_s in options.network_mbit_per_s]
    return PartAnswer(
        samples=tuple(sample for answer in answers for sample in answer.samples),
        failures=tuple(failure for answer in answers for failure in answer.failures),
        notes=tuple(note for answer in answers for note in answer.notes),
    )


def _over(
    options: SyncOptions, transports: tuple[TransportKind, ...], folder: Path, mbit_per_s: float, say: Say
) -> PartAnswer:
    link = link_name(mbit_per_s)
    with slow_network(1 + max(NETWORK_RECEIVERS), mbit_per_s) as machines:
        request = FleetRequest(
            sizes_mb=(options.network_size_mb,),
            receivers=NETWORK_RECEIVERS,
            transports=transports,
            shards=(),
            repeats=options.repeats,
            changed=options.changed,
            folder=str(folder),
            nodes=tuple(Node(host=machine.host, prefix=machine.prefix) for machine in machines),
            link=link,
        )
        say(f"{1 + max(NETWORK_RECEIVERS)} namespaces, {link}")
        command = [*machines[0].prefix, sys.executable, "-m", _INSIDE]
        try:
            done = subprocess.run(
                command,
                input=msgspec.json.encode(request) + b"\n",
                stdout=subprocess.PIPE,
                timeout=_DEADLINE_S,
                check=True,
                env={**quiet_environment(), **_OVER_THE_LINK},
            )
        except (OSError, subprocess.SubprocessError) as error:
            return PartAnswer(samples=(), failures=(f"network, {link}: {error}",))
    return msgspec.json.decode(done.stdout, type=PartAnswer)
