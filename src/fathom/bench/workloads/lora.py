"""A version of an adapter from the trainer to the engine, beside a version of the whole model.

Both ways end in an engine process of their own and take turns: digest and take the bytes, stage, verify, commit.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fathom.bench.options import LoraOptions
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median, ratios
from fathom.bench.rig.stand import tiny_model
from fathom.config.families import Dtype
from fathom.config.sync import SyncConfig
from fathom.core.adapter import AdapterForm, AdapterIdentity
from fathom.core.ids import EngineId
from fathom.core.records.sampling import InFlightMode
from fathom.model.language_model import LanguageModel
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.sync.adapters.adopt import AdapterStart, adopt
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

WHOLE, ADAPTER = "whole model", "adapter"
TIME, BYTES = "publication", "bytes"
_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
_CONTEXT_TOKENS, _KV_MB = 64, 64
_MOST_BYTES, _MOST_TIME = 0.02, 0.1


@final
@dataclass(slots=True, kw_only=True)
class _Way:
    """From a trainer's tensors to an engine."""

    publisher: Publisher
    tensors: Mapping[str, Tensor]
    adapter: AdapterIdentity | None
    number: int = 0

    async def publish(self) -> tuple[float, int]:
        """Seconds from the trainer's tensors to the engine that serves them, and their bytes."""
        self.number += 1
        for tensor in self.tensors.values():
            tensor.view(-1)[: self.number] += 0.01  # no version is like another
        done = await self.publisher.publish(self.tensors, self.number, 1, InFlightMode.CONTINUE, adapter=self.adapter)
        return done.write_s + done.stage_s + done.verify_s + done.commit_s, done.size_bytes


def lora(options: LoraOptions, say: Say) -> Measured:
    """Publish both ways in turns. The first publication of each takes memory for the first time and is not counted."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="fathom-lora-") as name:
        scratch = Path(name)
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        samples = asyncio.run(_measure(options, model, scratch, say))
    for measure in (TIME, BYTES):
        samples += ratios(samples, measure, ADAPTER, WHOLE)
    return Measured(
        samples=samples,
        targets=[_target(samples, BYTES, _MOST_BYTES), _target(samples, TIME, _MOST_TIME)],
        notes=[
            f"rank {options.rank} on all linear layers in {options.dtype} over {options.transport}; bytes grow with "
            "the rank and shrink with the width of the model"
        ],
    )


async def _measure(options: LoraOptions, model: Path, scratch: Path, say: Say) -> list[Sample]:
    form = AdapterForm(name="bench", rank=options.rank, alpha=2.0 * options.rank, rslora=False, targets=())
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        ways = {
            WHOLE: await _open(options, model, scratch / "whole", None, stack),
            ADAPTER: await _open(options, model, scratch / "adapter", form, stack),
        }
        for way in ways.values():
            await way.publish()
        for repeat, variant in alternating(list(ways), options.repeats):
            seconds, size = await ways[variant].publish()
            for measure, unit, value in ((TIME, "s", seconds), (BYTES, "byte", float(size))):
                samples.append(Sample(variant=variant, measure=measure, unit=unit, repeat=repeat, value=value))
            say(f"round {repeat + 1} of {options.repeats}: {variant}: {size / 1e6:.2f} MB in {seconds * 1e3:.1f} ms")
    return samples


async def _open(
    options: LoraOptions, model: Path, folder: Path, form: AdapterForm | None, stack: AsyncExitStack
) -> _Way:
    trained = LanguageModel.load(model, _DTYPES[options.dtype], "cpu")
    identity = None if form is None else adopt(trained, AdapterStart(form=form, seed=options.seed))
    folder.mkdir()
    spec = EmbeddedSpec(
        engine=EngineId(folder.name),
        model_folder=model,
        log_path=folder / "engine.log",
        max_context_tokens=_CONTEXT_TOKENS,
        max_running=1,
        kv_memory_mb=_KV_MB,
        dtype=options.dtype,
        threads=options.threads,
        adapter=form,
    )
    engine = await EmbeddedEngine.launch(spec)
    stack.push_async_callback(engine.close)
    config = SyncConfig(transport=options.transport)
    publisher = Publisher([engine], TRANSPORTS[options.transport](folder, config), config)
    stack.push_async_callback(publisher.close)
    weights = {name: tensor.detach() for name, tensor in trained.weights().items()}
    return _Way(publisher=publisher, tensors=weights, adapter=identity)


def _target(samples: Sequence[Sample], measure: str, limit: float) -> Target:
    return Target(
        claim=f"{measure} of an adapter, as a share of the whole model's",
        measured=median(samples, f"{ADAPTER} / {WHOLE}", f"{measure}, ratio"),
        limit=limit,
        at_most=True,
        required=False,
    )
