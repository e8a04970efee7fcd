"""How long a version takes from the trainer to the engine on one host, and how long generation stands still for it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from fathom.bench.options import SyncOptions
from fathom.bench.record import Measured, Sample, Say, Target, median
from fathom.bench.rig.stand import PROMPT_TOKENS, Stand, open_stand, tiny_model
from fathom.config.families import TransportKind
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import TrainerConfig
from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.sync.publication import Publication

IDLE, BUSY = "idle", "generating"
DELIVER, PAUSE = "stage to commit", "paused"


def sync(options: SyncOptions, say: Say) -> Measured:
    """Publish over every transport, idle and generating in turn."""
    with tempfile.TemporaryDirectory(prefix=".fathom-sync-", dir=options.folder or ".") as name:
        scratch = Path(name)
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        samples: list[Sample] = []
        for transport in TransportKind:
            samples += asyncio.run(_transport(options, model, scratch, transport, say))
    return Measured(samples=samples, targets=list(_targets(samples)), notes=_NOTES)


async def _transport(
    options: SyncOptions, model: Path, scratch: Path, transport: TransportKind, say: Say
) -> list[Sample]:
    trainer = TrainerConfig(steps=1, groups_per_step=1, dtype=options.dtype)
    samples: list[Sample] = []
    async with open_stand(
        model,
        scratch,
        trainer,
        max_context_tokens=PROMPT_TOKENS + options.max_new_tokens,
        max_running=options.requests,
        engine_config=EngineConfig(threads=options.threads),
        transport=transport,
    ) as stand:
        await stand.publish(0)
        for number in range(1, 2 * options.repeats + 1):
            repeat, busy = divmod(number - 1, 2)
            variant = f"{transport}, {BUSY if busy else IDLE}"
            if busy:
                async with _generating(options, stand):
                    publication = await stand.publish(number, InFlightMode.CONTINUE)
            else:
                publication = await stand.publish(number, InFlightMode.CONTINUE)
            samples += _samples(variant, repeat, publication)
        size_bytes = sum(tensor.nbytes for tensor in stand.backend.weights().values())
        say(f"{transport}: {2 * options.repeats} publications of {size_bytes / 1e6:.0f} MB")
    return samples


@asynccontextmanager
async def _generating(options: SyncOptions, stand: Stand) -> AsyncGenerator[None]:
    """The engine decodes `options.requests` sequences inside. Raises EngineError when one fails."""
    async with asyncio.TaskGroup() as streams:
        begun = [asyncio.Event() for _ in range(options.requests)]
        tasks = [streams.create_task(_stream(options, stand, event)) for event in begun]
        for event in begun:
            await event.wait()
        yield
        for task in tasks:
            task.cancel()


async def _stream(options: SyncOptions, stand: Stand, begun: asyncio.Event) -> None:
    """One generation after the other, until cancelled; says when the first token is there."""
    prompt_ids = stand.renderer.render_prompt([{"role": "user", "content": "1+1="}])
    while True:
        name = uuid4().hex
        request = GenerateRequest(
            request_id=name,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(),
            seed=0,
            max_new_tokens=options.max_new_tokens,
            stop_ids=(),
            priority=0,
            session_key=name,
            purpose=Purpose.ROLLOUT,
        )
        async for _ in stand.engine.generate(request):
            begun.set()


def _samples(variant: str, repeat: int, publication: Publication) -> list[Sample]:
    delivered = publication.stage_s + publication.verify_s + publication.commit_s
    measures = {
        "write": publication.write_s,
        "stage": publication.stage_s,
        "verify": publication.verify_s,
        "commit": publication.commit_s,
        DELIVER: delivered,
        PAUSE: publication.pause_s,
    }
    return [
        Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value)
        for measure, value in measures.items()
    ]


def _targets(samples: Sequence[Sample]) -> Iterator[Target]:
    """For the fast transport, in the harder case."""
    variant = f"{TransportKind.SHARED}, {BUSY}"
    for measure, limit in ((DELIVER, 1.0), (PAUSE, 0.2)):
        yield Target(
            claim=f"{variant}: {measure}, s",
            measured=median(samples, variant, measure),
            limit=limit,
            at_most=True,
            required=False,
        )


_NOTES = ("write is the trainer's side: digest and copy; stage, verify and commit are the engine's",)
