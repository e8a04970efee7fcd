"""What the plan would have said about a machine, beside what `fathom bench sync` measured on it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from fathom.bench.options import SyncOptions
from fathom.bench.record import BenchRecord, read_record, values
from fathom.bench.workloads.sync.names import (
    DIGEST,
    HOLD,
    NETWORK_RECEIVERS,
    TRANSFER,
    VERIFY,
    fleet_variant,
    link_name,
)
from fathom.core.errors import ConfigError
from fathom.sync.plan.forecast import Forecast, Taken, forecast

_MB = 1e6
_PHASES = (DIGEST, HOLD, TRANSFER, VERIFY)
_NAMES = ("shared", "disk", "broadcast", "p2p", "p2p by NIXL", "p2p by Mooncake")
"""Transports whose bytes do not depend on what changed."""


def forecast_of(path: Path) -> list[Forecast]:
    """Predict a record's publications to receivers in processes of their own. Medians of its repeats.

    Raises:
        ConfigError: the file is no record of `fathom bench sync`, or holds no such publications.
    """
    record = _read(path)
    taken = list(_taken(record))
    if not taken:
        raise ConfigError(
            f"{path} holds no publications to receivers in processes of their own; measure them with: "
            "fathom bench sync parts='[\"fleet\"]'"
        )
    return forecast(taken, record.machine.cores)


def _read(path: Path) -> BenchRecord:
    record = read_record(path)
    if record.workload != "sync":
        raise ConfigError(f"{path} is a record of 'fathom bench {record.workload}'; give one of 'fathom bench sync'")
    return record


def _taken(record: BenchRecord) -> Iterator[Taken]:
    options = SyncOptions.model_validate_json(bytes(record.options))
    places = [(size_mb, count, None) for size_mb in options.sizes_mb for count in options.receivers]
    for mbit_per_s in options.network_mbit_per_s:
        places += [(options.network_size_mb, count, mbit_per_s) for count in NETWORK_RECEIVERS]
    for transport in _NAMES:
        for size_mb, count, mbit_per_s in places:
            variant = fleet_variant(transport, size_mb, count, "" if mbit_per_s is None else link_name(mbit_per_s))
            for phase in _PHASES if mbit_per_s is None else (TRANSFER,):
                measured = values(record.samples, variant, phase)
                if measured:
                    yield Taken(
                        transport=transport,
                        size_bytes=size_mb * _MB,
                        receivers=count,
                        phase=phase,
                        seconds=statistics.median(measured),
                        link_bytes_per_s=None if mbit_per_s is None else mbit_per_s * 1e6 / 8,
                    )
