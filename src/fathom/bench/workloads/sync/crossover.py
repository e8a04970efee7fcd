"""Deltas against full files over storage of any speed, from the samples of a record. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from fathom.bench.record import Sample, median, values
from fathom.bench.workloads.sync.names import END_TO_END, MOVED, has

DELTA, FULL = "delta", "full file"
"""The two sides."""
_TOUCHES = 2
"""Every byte is written once and read once."""


def rate_variant(lr: float) -> str:
    """E.g. `lr 1e-06`."""
    return f"lr {lr:g}"


def storage_variant(side: str, lr: float, mb_per_s: float) -> str:
    """E.g. `delta, lr 1e-06, 200 MB/s`. 0: as fast as memory."""
    return f"{side}, {rate_variant(lr)}, " + (f"{mb_per_s:g} MB/s" if mb_per_s else "in memory")


def measured_speeds(samples: Sequence[Sample], lr: float) -> list[float]:
    """Speeds of storage, MB/s, at which publications of this learning rate were timed; ascending, without memory."""
    begin, end = f"{DELTA}, {rate_variant(lr)}, ", " MB/s"
    variants = {sample.variant for sample in samples if sample.measure == END_TO_END}
    names = [variant.removeprefix(begin) for variant in variants if variant.startswith(begin)]
    return sorted(float(name.removesuffix(end)) for name in names if name.endswith(end))


def was_measured(samples: Sequence[Sample], lr: float) -> bool:
    """Whether both sides were published at this learning rate."""
    return all(has(samples, storage_variant(side, lr, 0)) for side in (DELTA, FULL))


def predicted_s(samples: Sequence[Sample], side: str, lr: float, mb_per_s: float) -> float:
    """Seconds end to end: what it takes in memory, and the time of the bytes at that speed."""
    variant = storage_variant(side, lr, 0)
    return median(samples, variant, END_TO_END) + _TOUCHES * median(samples, variant, MOVED) / mb_per_s


def measured_s(samples: Sequence[Sample], side: str, lr: float, mb_per_s: float) -> list[float]:
    """Seconds end to end of each publication at that speed."""
    return values(samples, storage_variant(side, lr, mb_per_s), END_TO_END)


def crossover_mb_per_s(samples: Sequence[Sample], lr: float) -> float | None:
    """The speed at which both take the same time; below it, the delta is faster. None: it is at any speed."""
    seconds, moved = (
        {side: median(samples, storage_variant(side, lr, 0), measure) for side in (FULL, DELTA)}
        for measure in (END_TO_END, MOVED)
    )
    extra_s = seconds[DELTA] - seconds[FULL]
    return _TOUCHES * (moved[FULL] - moved[DELTA]) / extra_s if extra_s > 0 else None
