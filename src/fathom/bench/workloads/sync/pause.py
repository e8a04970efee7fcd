"""How long a version takes to a real engine, and how long generation stands still for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from fathom.bench.options import SyncOptions
from fathom.bench.record import Sample, Say, Target, median
from fathom.bench.rig.fleet.made_up import change
from fathom.bench.rig.fleet.messages import RawKind
from fathom.bench.rig.fleet.raw.link import available
from fathom.bench.rig.stand import PROMPT_TOKENS, Stand, open_stand
from fathom.bench.workloads.sync.answer import PartAnswer
from fathom.bench.workloads.sync.names import COMMIT, PAUSE, VERIFY, has
from fathom.config.families import TransportKind
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import TrainerConfig
from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.sync.publication import Publication

IDLE, BUSY = "idle", "generating"
WRITE, STAGE, DELIVER = "digest and write", "stage", "stage to commit"
_MOST_PAUSED = 0.25


def engine_variant(transport: str, state: str) -> str:
    """E.g. `shared, generating`."""
    return f"{transport}, {state}"


def measure_pause(options: SyncOptions, model: Path, scratch: Path, say: Say) -> PartAnswer:
    """Publish over every transport, idle and generating in turn."""
    samples: list[Sample] = []
    failures: list[str] = []
    notes: list[str] = []
    for transport in options.transports:
        if transport is TransportKind.P2P and not available(RawKind.NIXL):
            notes.append(f"{transport} to an engine: left out, NIXL is not installed")
            continue
        try:
            samples += asyncio.run(_transport(options, model, scratch, transport, say))
        except Exception as error:  # noqa: BLE001 - the boundary: whatever fails, the others are measured
            failures.append(f"{transport} to an engine: {type(error).__name__}: {error}")
    return PartAnswer(samples=tuple(samples), failures=tuple(failures), notes=tuple(notes))


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
            variant = engine_variant(transport, BUSY if busy else IDLE)
            change(stand.backend.weights(), options.changed, seed=number)
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
        WRITE: publication.write_s,
        STAGE: publication.stage_s,
        VERIFY: publication.verify_s,
        COMMIT: publication.commit_s,
        DELIVER: delivered,
        PAUSE: publication.pause_s,
    }
    return [
        Sample(variant=variant, measure=measure, unit="s", repeat=repeat, value=value)
        for measure, value in measures.items()
    ]


def pause_targets(samples: Sequence[Sample]) -> Iterator[Target]:
    """The share of a delivery during which a generating engine stands still."""
    for transport in TransportKind:
        variant = engine_variant(transport, BUSY)
        if has(samples, variant):
            yield Target(
                claim=f"{variant}: share of a publication in which generation stands still",
                measured=median(samples, variant, PAUSE) / median(samples, variant, DELIVER),
                limit=_MOST_PAUSED,
                at_most=True,
                required=False,
            )
