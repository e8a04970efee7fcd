"""Tokens per second of the embedded engine, plain and aligned, beside `generate` of transformers and beside vLLM.

Every side serves the same requests with the same weights: random prompts, exactly as many new tokens, temperature 1.
Ours and vLLM are asked over HTTP and return log-probabilities, `generate` is called in its process and returns none.
The sides take turns, each round in fresh processes, so all see the same machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from fathom.bench.options import EngineOptions
from fathom.bench.peers.generate_request import GenerateRequest as PeerRequest
from fathom.bench.record import Measured, Sample, Say, Target, alternating, median, ratios
from fathom.bench.rig.stand import Stand, open_stand, tiny_model, vocab_size
from fathom.bench.rig.still_forward import step_overhead_s
from fathom.config.families import EngineKind
from fathom.config.rollout import EngineConfig
from fathom.config.trainer import TrainerConfig
from fathom.config.vllm import VllmConfig
from fathom.core.errors import ConfigError, NoProgressError
from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import Purpose, SamplingParams

OURS, ALIGNED, GENERATE, VLLM = "Fathom", "Fathom, aligned", "generate", "vLLM"
_SCRIPT = "fathom.bench.peers.generate_steps"
_PEER_S = 1800.0
_OVERHEAD_BATCH = 32
_TIMES_GENERATE, _TIMES_VLLM, _TIMES_ALIGNED = 1.4, 0.9, 2.0


def engine(options: EngineOptions, say: Say) -> Measured:
    """Measure each side at each batch. Raises ConfigError or EngineError when a side cannot be run."""
    sides = [OURS, ALIGNED]
    sides += [GENERATE] if options.generate else []
    sides += [VLLM] if options.vllm is not None else []
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="fathom-engine-") as name:
        scratch = Path(name)
        model = Path(options.model) if options.model else tiny_model(scratch / "model")
        for repeat, side in alternating(sides, options.repeats):
            if side == GENERATE:
                speeds = _generate(options, model)
            else:
                speeds = asyncio.run(_engine(options, side, model, scratch))
            samples += [
                Sample(variant=side, measure=_measure(batch), unit="token/s", repeat=repeat, value=speed)
                for batch, speed in speeds.items()
            ]
            shown = ", ".join(f"{speed:.0f} at {batch}" for batch, speed in speeds.items())
            say(f"round {repeat + 1} of {options.repeats}: {side}: tokens/s {shown}")
    for batch in options.batches:
        for other in sides[1:]:
            pair = (OURS, other)
            samples += ratios(samples, _measure(batch), *pair)
    for repeat in range(options.repeats):
        overhead = step_overhead_s(_OVERHEAD_BATCH)
        samples.append(Sample(variant=OURS, measure=_OVERHEAD, unit="s", repeat=repeat, value=overhead))
    return Measured(samples=samples, targets=list(_targets(options, sides, samples)))


_OVERHEAD = f"a step of {_OVERHEAD_BATCH} sequences without a model"


def _measure(batch: int) -> str:
    return f"{batch} at once"


async def _engine(options: EngineOptions, side: str, model: Path, scratch: Path) -> dict[int, float]:
    """Tokens per second at each batch, the first request of each being a warm-up."""
    async with open_stand(
        model,
        scratch,
        TrainerConfig(steps=1, groups_per_step=1, dtype=options.dtype, threads=options.threads),
        max_context_tokens=options.prompt_tokens + options.new_tokens,
        max_running=max(options.batches),
        engine_config=EngineConfig(
            kind=EngineKind.VLLM if side == VLLM else EngineKind.EMBEDDED,
            vllm=VllmConfig(environment=options.vllm) if side == VLLM else None,
            threads=options.threads,
        ),
        aligned=side == ALIGNED,
    ) as stand:
        await stand.publish(0)
        speeds: dict[int, float] = {}
        for batch in options.batches:
            await _round(options, stand, f"warm {side}", batch, new_tokens=8)
            began = time.perf_counter()
            tokens = await _round(options, stand, side, batch, options.new_tokens)
            speeds[batch] = tokens / (time.perf_counter() - began)
        return speeds


async def _round(options: EngineOptions, stand: Stand, name: str, batch: int, new_tokens: int) -> int:
    """Sampled tokens, all requests together. Raises NoProgressError when a request sampled fewer."""
    prompts = _prompts(options, batch, stand.vocab_size, warm=new_tokens != options.new_tokens)

    async def run(index: int) -> int:
        request = GenerateRequest(
            request_id=f"{name}/{batch}/{index}",
            prompt_ids=prompts[index],
            sampling=SamplingParams(),
            seed=index,
            max_new_tokens=new_tokens,
            stop_ids=(),
            priority=index,
            session_key=f"{batch}/{index}",
            purpose=Purpose.PROBE,
        )
        return sum([len(chunk.logprobs) async for chunk in stand.engine.generate(request)])

    counts = await asyncio.gather(*map(run, range(batch)))
    if set(counts) != {new_tokens}:
        raise NoProgressError(f"{name} sampled {sorted(set(counts))} tokens, not {new_tokens}: not compared")
    return sum(counts)


def _prompts(options: EngineOptions, batch: int, ids: int, *, warm: bool) -> np.ndarray:
    """int32 [batch, prompt_tokens]."""
    generator = np.random.default_rng([batch, int(warm)])
    return generator.integers(0, ids, (batch, options.prompt_tokens)).astype(np.int32)


def _generate(options: EngineOptions, model: Path) -> dict[int, float]:
    """Tokens per second at each batch, of a process of its own."""
    ids = vocab_size(model)
    speeds: dict[int, float] = {}
    for batch in options.batches:
        request = PeerRequest(
            model=str(model),
            dtype=options.dtype,
            threads=options.threads,
            prompts=tuple(map(tuple, _prompts(options, batch, ids, warm=False).tolist())),
            max_new_tokens=options.new_tokens,
        )
        done = subprocess.run(
            [sys.executable, "-m", _SCRIPT],
            input=msgspec.json.encode(request) + b"\n",
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            timeout=_PEER_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"generate failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
        speeds[batch] = batch * options.new_tokens / msgspec.json.decode(done.stdout.splitlines()[-1], type=float)
    return speeds


def _targets(options: EngineOptions, sides: Sequence[str], samples: Sequence[Sample]) -> Iterator[Target]:
    for batch in options.batches:
        ours = median(samples, OURS, _measure(batch))
        for side, word, limit in ((GENERATE, "generate", _TIMES_GENERATE), (VLLM, "vLLM", _TIMES_VLLM)):
            if side in sides:
                times = ours / median(samples, side, _measure(batch))
                claim = f"{word} at {batch}, times as fast"
                yield Target(claim=claim, measured=times, limit=limit, at_most=False, required=False)
        price = ours / median(samples, ALIGNED, _measure(batch))
        claim = f"price of aligned mode at {batch}"
        yield Target(claim=claim, measured=price, limit=_TIMES_ALIGNED, at_most=True, required=False)
    measured = median(samples, OURS, _OVERHEAD)
    yield Target(claim=f"{_OVERHEAD}, s", measured=measured, limit=1e-3, at_most=True, required=False)
