"""What an optimizer step changes, and at which speed of storage it pays to send only that."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fathom.bench.options import SyncOptions
from fathom.bench.record import Sample, Say, Target, median, values
from fathom.bench.rig.fleet.made_up import forms_of
from fathom.bench.rig.fleet.receiver_process import ReceiverProcess
from fathom.bench.rig.fleet.timed_transport import TimedTransport
from fathom.bench.rig.real_steps import Step, answers, cold_step, warm_steps
from fathom.bench.rig.throttled_files import make_known, throttled_url
from fathom.bench.workloads.sync.answer import PartAnswer
from fathom.bench.workloads.sync.crossover import (
    DELTA,
    FULL,
    crossover_mb_per_s,
    measured_s,
    measured_speeds,
    rate_variant,
    storage_variant,
    was_measured,
)
from fathom.bench.workloads.sync.fleet import MB, publication_samples
from fathom.bench.workloads.sync.names import (
    COMMIT,
    DIGEST,
    END_TO_END,
    HOLD,
    MOVED,
    TRANSFER,
    VERIFY,
)
from fathom.config.families import TransportKind
from fathom.config.sync import ChainConfig, SyncConfig
from fathom.core.errors import NoProgressError
from fathom.core.ids import EngineId
from fathom.core.records.sampling import InFlightMode
from fathom.sync.chain.codec import count_changed, elements
from fathom.sync.digest import byte_view
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

ELEMENTS, ELEMENTS_COLD, SHARE, ANCHOR = "changed elements", "changed elements, cold Adam", "share moved", "anchor"
CROSSOVER = "crossover"
_MEMORY = Path("/dev/shm")
_MOST_MOVED = 0.1
_SLOW_MB_PER_S = 200.0


def measure_delta(options: SyncOptions, model: Path, scratch: Path, say: Say) -> PartAnswer:
    """Real steps at each learning rate, each published as a full file and as a delta, at each speed of storage.

    At the last learning rate also at half and at twice the speed at which they should take the same time.
    """
    batches = answers(model, scratch, options.dtype, options.warm_steps + options.counted_steps)
    say(f"delta: {len(batches)} batches of answers")
    samples: list[Sample] = []

    def publish(steps: Sequence[Step], lr: float, mb_per_s: float) -> None:
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else scratch) as folder:
            samples.extend(asyncio.run(_publish(steps, lr, mb_per_s, Path(folder), scratch)))

    for lr in options.learning_rates:
        variant = rate_variant(lr)
        steps = warm_steps(model, options.dtype, lr, batches, options.warm_steps)
        say(f"delta: {variant}: {len(batches)} steps")
        samples += _shares(variant, ELEMENTS, [_changed(step) for step in steps])
        samples += _shares(variant, ELEMENTS_COLD, [_changed(cold_step(model, options.dtype, lr, batches))])
        for mb_per_s in (0.0, *options.storage_mb_per_s):
            publish(steps, lr, mb_per_s)
        samples += _shares(variant, SHARE, _moved_shares(samples, lr, steps))
        crossover = crossover_mb_per_s(samples, lr)
        if crossover is not None:
            samples.append(Sample(variant=variant, measure=CROSSOVER, unit="MB/s", repeat=0, value=crossover))
            for mb_per_s in _around(crossover) if lr == options.learning_rates[-1] else ():
                publish(steps, lr, mb_per_s)
        share = median(samples, variant, SHARE)
        say(f"delta: {variant}: {share:.1%} of the bytes; crossover: {_speed(crossover)}")
    return PartAnswer(samples=tuple(samples))


def delta_targets(options: SyncOptions, samples: Sequence[Sample]) -> Iterator[Target]:
    """How much travels, whether that is faster over slow storage, and whether the crossover is where it should be."""
    for lr in filter(lambda lr: was_measured(samples, lr), options.learning_rates):
        variant, crossover = rate_variant(lr), crossover_mb_per_s(samples, lr)
        shares = values(samples, variant, SHARE)
        claim = f"{variant}: share of the bytes that travels, largest of {len(shares)} steps"
        yield Target(claim=claim, measured=max(shares), limit=_MOST_MOVED, at_most=True, required=False)
        for mb_per_s in measured_speeds(samples, lr):
            full, delta = (statistics.median(measured_s(samples, side, lr, mb_per_s)) for side in (FULL, DELTA))
            slow = mb_per_s <= _SLOW_MB_PER_S or crossover is None or mb_per_s < crossover
            claim = f"{variant}: delta at {mb_per_s:g} MB/s, times as fast as the full file"
            yield Target(claim=claim, measured=full / delta, limit=1.0, at_most=not slow, required=False)


def _around(crossover: float) -> tuple[float, float]:
    """Half and twice, to two figures."""
    return float(f"{crossover / 2:.2g}"), float(f"{crossover * 2:.2g}")


def _speed(mb_per_s: float | None) -> str:
    return "none, the delta is faster at any speed" if mb_per_s is None else f"{mb_per_s:.0f} MB/s"


@dataclass(frozen=True, slots=True)
class _Side:
    """One way to publish, with a receiver of its own."""

    name: str
    receiver: ReceiverProcess
    publisher: Publisher
    timed: TimedTransport


async def _publish(steps: Sequence[Step], lr: float, mb_per_s: float, folder: Path, logs: Path) -> list[Sample]:
    """Every step over both sides in turn. The first version is an anchor, and whole: it is told apart."""
    samples: list[Sample] = []
    versions = [steps[0].before, *(step.after for step in steps)]
    async with _sides(versions[0], mb_per_s, folder, logs) as sides:
        for number, version in enumerate(versions):
            for side in sides if number % 2 else sides[::-1]:
                publication = await side.publisher.publish(version, number, 1, InFlightMode.CONTINUE)
                if publication.fenced:
                    raise NoProgressError(f"the receiver of {side.name} failed: {dict(publication.fenced)}")
                variant = storage_variant(side.name, lr, mb_per_s)
                taken = publication_samples(variant, number - 1, publication, side.timed, receivers=1)
                if number > 0:
                    samples += [*taken, _end_to_end(variant, number - 1, taken)]
                elif side.name == DELTA:
                    samples += [
                        Sample(variant=variant, measure=ANCHOR, unit=each.unit, repeat=0, value=each.value)
                        for each in taken
                        if each.measure == MOVED
                    ]
    return samples


@asynccontextmanager
async def _sides(
    weights: dict[str, Tensor], mb_per_s: float, folder: Path, logs: Path
) -> AsyncGenerator[tuple[_Side, _Side]]:
    make_known()
    speed = mb_per_s * MB or None
    chain = SyncConfig(
        transport=TransportKind.DELTA, chain=ChainConfig(store=throttled_url(mb_per_s, folder / "store"))
    )
    async with AsyncExitStack() as stack:
        sides: list[_Side] = []
        for name, config, own_speed in (
            (FULL, SyncConfig(transport=TransportKind.DISK), speed),
            (DELTA, chain, None),  # its store sleeps
        ):
            receiver = ReceiverProcess.launch(EngineId(name.replace(" ", "-")), logs)
            stack.push_async_callback(receiver.close)
            await receiver.open(forms_of(weights), storage_bytes_per_s=own_speed)
            timed = TimedTransport(TRANSPORTS[config.transport](folder, config), own_speed)
            publisher = Publisher([receiver], timed, config)
            stack.push_async_callback(publisher.close)
            sides.append(_Side(name, receiver, publisher, timed))
        yield sides[0], sides[1]


def _end_to_end(variant: str, repeat: int, taken: Sequence[Sample]) -> Sample:
    parts = (DIGEST, HOLD, TRANSFER, VERIFY, COMMIT)
    total = sum(each.value for each in taken if each.measure in parts)
    return Sample(variant=variant, measure=END_TO_END, unit="s", repeat=repeat, value=total)


def _changed(step: Step) -> float:
    """Share of elements that differ."""
    changed = total = 0
    for name, before in step.before.items():
        old, new = (elements(byte_view(tensor).numpy(), tensor.element_size()) for tensor in (before, step.after[name]))
        changed += count_changed(old, new)
        total += len(new)
    return changed / total


def _moved_shares(samples: Sequence[Sample], lr: float, steps: Sequence[Step]) -> list[float]:
    size_mb = sum(tensor.nbytes for tensor in steps[0].after.values()) / MB
    return [moved / size_mb for moved in values(samples, storage_variant(DELTA, lr, 0), MOVED)]


def _shares(variant: str, measure: str, shares: Sequence[float]) -> list[Sample]:
    return [
        Sample(variant=variant, measure=measure, unit="", repeat=repeat, value=share)
        for repeat, share in enumerate(shares)
    ]
