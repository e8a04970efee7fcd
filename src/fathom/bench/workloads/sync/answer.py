"""What a part of the workload comes back with."""

from __future__ import annotations

import msgspec

from fathom.bench.record import Sample


class PartAnswer(msgspec.Struct, frozen=True, tag="bench_part_answer.1"):
    """What was measured, and what was not."""

    samples: tuple[Sample, ...]
    """See `BenchRecord`."""
    failures: tuple[str, ...] = ()
    """What could not be measured though it should have been, and why."""
    notes: tuple[str, ...] = ()
    """What was left out on purpose."""
