"""The workload: the parts asked for, one after the other, into one record."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fathom.bench.options import SyncOptions, SyncPart
from fathom.bench.record import Measured, Sample, Say
from fathom.bench.rig.stand import tiny_model
from fathom.bench.workloads.sync.answer import PartAnswer
from fathom.bench.workloads.sync.delta import delta_targets, measure_delta
from fathom.bench.workloads.sync.fleet import FleetRequest, one_machine, run_fleet
from fathom.bench.workloads.sync.network import measure_network
from fathom.bench.workloads.sync.pause import measure_pause, pause_targets
from fathom.bench.workloads.sync.targets import failure_target, fleet_ratios, fleet_targets


def sync(options: SyncOptions, say: Say) -> Measured:
    """Measure the parts. What fails is a note and a missed target; the rest is measured all the same."""
    samples: list[Sample] = []
    failures: list[str] = []
    notes: list[str] = [_PHASES]
    with tempfile.TemporaryDirectory(prefix=".fathom-sync-", dir=options.folder or ".") as name:
        scratch = Path(name).resolve()
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        for part in options.parts:
            try:
                answer = _measure(part, options, model, scratch, say)
            except Exception as error:  # noqa: BLE001 - the boundary: minutes of other parts are not thrown away
                answer = PartAnswer(samples=(), failures=(f"{part}: {type(error).__name__}: {error}",))
            samples += answer.samples
            failures += answer.failures
            notes += answer.notes
    if {SyncPart.PAUSE, SyncPart.DELTA} & set(options.parts):
        notes.append(_model_note(options))
    if SyncPart.DELTA in options.parts:
        notes.append(_DELTA.format(warm_steps=options.warm_steps))
    samples += fleet_ratios(options, samples)
    targets = [
        *fleet_targets(options, samples),
        *pause_targets(samples),
        *delta_targets(options, samples),
        failure_target(failures),
    ]
    return Measured(samples=samples, targets=targets, notes=[*notes, *(f"FAILED: {failure}" for failure in failures)])


def _measure(part: SyncPart, options: SyncOptions, model: Path, scratch: Path, say: Say) -> PartAnswer:
    match part:
        case SyncPart.FLEET:
            return run_fleet(_fleet(options, scratch), say)
        case SyncPart.NETWORK:
            return measure_network(options, scratch, say)
        case SyncPart.PAUSE:
            return measure_pause(options, model, scratch, say)
        case SyncPart.DELTA:
            return measure_delta(options, model, scratch, say)


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


def _model_note(options: SyncOptions) -> str:
    if options.model is not None:
        return f"model of pause and delta: {options.model}"
    return "model of pause and delta: the demo's tiny one, for want of --model (fathom models fetch smollm2-135m)"


_PHASES = (
    "digest and write are the trainer's side; transfer, verify and commit that of the slowest receiver; "
    "transfer includes getting ready to send"
)
_DELTA = (
    "delta: GRPO steps on the model's own answers to small sums, {warm_steps} of them to warm Adam's moments; storage "
    "is simulated: every read and write of a process sleeps its bytes' time, in memory otherwise"
)
