"""The workloads by name, one module each. They are loaded when they are run: most of them need torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fathom.bench.options import (
    EngineOptions,
    LedgerOptions,
    LoraOptions,
    PipelineOptions,
    ProbeOptions,
    SessionOptions,
    SyncOptions,
    TrainOptions,
)
from fathom.bench.record import BenchRecord, Measured, Say, take
from fathom.config.load import parse_section
from fathom.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What can be measured."""

    about: str
    """One sentence."""
    options: type[Section]
    """Its options."""
    measure: Callable[[Any, Say], Measured]
    """Takes an instance of them and says how far it is."""


def _probe(options: ProbeOptions, say: Say) -> Measured:
    from fathom.bench.workloads.probe import probe

    return probe(options, say)


def _engine(options: EngineOptions, say: Say) -> Measured:
    from fathom.bench.workloads.engine import engine

    return engine(options, say)


def _pipeline(options: PipelineOptions, say: Say) -> Measured:
    from fathom.bench.workloads.pipeline import pipeline

    return pipeline(options, say)


def _ledger(options: LedgerOptions, say: Say) -> Measured:
    from fathom.bench.workloads.ledger import ledger

    return ledger(options, say)


def _session(options: SessionOptions, say: Say) -> Measured:
    from fathom.bench.workloads.session import session

    return session(options, say)


def _sync(options: SyncOptions, say: Say) -> Measured:
    from fathom.bench.workloads.sync.sync import sync

    return sync(options, say)


def _lora(options: LoraOptions, say: Say) -> Measured:
    from fathom.bench.workloads.lora import lora

    return lora(options, say)


def _train(options: TrainOptions, say: Say) -> Measured:
    from fathom.bench.workloads.train import train

    return train(options, say)


WORKLOADS: dict[str, Workload] = {
    "probe": Workload(
        about="Engine against trainer on one version in float32, under five sampling settings.",
        options=ProbeOptions,
        measure=_probe,
    ),
    "engine": Workload(
        about="Tokens per second of the engine, plain and aligned, beside transformers and vLLM.",
        options=EngineOptions,
        measure=_engine,
    ),
    "pipeline": Workload(
        about="Asynchronous against synchronous against a plain loop, when answers take their time.",
        options=PipelineOptions,
        measure=_pipeline,
    ),
    "ledger": Workload(
        about="Tokens per second that the ledger takes in, by length of trajectory.",
        options=LedgerOptions,
        measure=_ledger,
    ),
    "session": Workload(
        about="A turn through the session server beside the engine alone, by length of history.",
        options=SessionOptions,
        measure=_session,
    ),
    "sync": Workload(
        about="A version from the trainer to the engine on one host, and the pause it causes.",
        options=SyncOptions,
        measure=_sync,
    ),
    "lora": Workload(
        about="A version of an adapter from the trainer to the engine, beside one of the whole model.",
        options=LoraOptions,
        measure=_lora,
    ),
    "train": Workload(
        about="One GRPO step, generation included, and training alone, beside the same by TRL.",
        options=TrainOptions,
        measure=_train,
    ),
}
"""In the order of the help."""


def run_workload(name: str, values: Mapping[str, Any], say: Say) -> BenchRecord:
    """Measure and make the record. Raises ConfigError when an option is wrong."""
    workload = WORKLOADS[name]
    options = parse_section(workload.options, values, origin=name)
    return take(name, options, lambda: workload.measure(options, say))
