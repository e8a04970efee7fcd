"""The workload: the parts asked for, one after the other, into one record."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fathom.bench.options import SyncOptions, SyncPart
from fathom.bench.record import Measured, Sample, Say, Target
from fathom.bench.rig.stand import tiny_model
from fathom.bench.workloads.sync.delta import delta_targets, measure_delta
from fathom.bench.workloads.sync.fleet import FleetAnswer, FleetRequest, one_machine, run_fleet
from fathom.bench.workloads.sync.network import measure_network
from fathom.bench.workloads.sync.pause import measure_pause, pause_targets
from fathom.bench.workloads.sync.targets import failure_target, fleet_ratios, fleet_targets


def sync(options: SyncOptions, say: Say) -> Measured:
    """Measure the parts. What fails is a note and a missed target; the rest is measured all the same."""
    samples: list[Sample] = []
    targets: list[Target] = []
    failures: list[str] = []
    notes: list[str] = [*_NOTES]
    with tempfile.TemporaryDirectory(prefix=".fathom-sync-", dir=options.folder or ".") as name:
        scratch = Path(name).resolve()
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        for part in options.parts:
            match part:
                case SyncPart.FLEET:
                    answer = run_fleet(_fleet(options, scratch), say)
                case SyncPart.NETWORK:
                    answer = measure_network(options, scratch, say)
                case SyncPart.PAUSE:
                    taken = measure_pause(options, model, scratch, say)
                    targets += pause_targets(taken)
                    answer = FleetAnswer(samples=tuple(taken), failures=(), notes=())
                case SyncPart.DELTA:
                    taken = measure_delta(options, model, scratch, say)
                    targets += delta_targets(options, taken)
                    answer = FleetAnswer(samples=tuple(taken), failures=(), notes=(_delta_note(options),))
            samples += answer.samples
            failures += answer.failures
            notes += answer.notes
    samples += fleet_ratios(options, samples)
    targets = [*fleet_targets(options, samples), *targets, failure_target(failures)]
    return Measured(samples=samples, targets=targets, notes=[*notes, *(f"FAILED: {failure}" for failure in failures)])


def _fleet(options: SyncOptions, scratch: Path) -> FleetRequest:
    return FleetRequest(
        sizes_mb=options.sizes_mb,
        receivers=options.receivers,
        transports=options.transports,
        shards=options.shards,
        repeats=options.repeats,
        changed=options.changed,
        folder=str(scratch),
        nodes=one_machine(max(options.receivers)),
    )


def _delta_note(options: SyncOptions) -> str:
    model = f"model {options.model}" if options.model else f"the demo's tiny model: {_NO_MODEL}"
    return (
        f"delta: {model}; GRPO steps on its own answers to small sums, {options.warm_steps} steps to warm the moments; "
        "storage is simulated: every read and write of one process sleeps its bytes' time"
    )


_NO_MODEL = "no --model was given; fathom models fetch smollm2-135m"
_NOTES = (
    "digest and write are the trainer's side; transfer, verify and commit that of the slowest receiver; "
    "transfer includes getting ready to send",
)
