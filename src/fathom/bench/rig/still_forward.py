"""What a step costs when the model costs nothing: planning, sampling, bookkeeping, chunks."""

from __future__ import annotations

import asyncio
import time
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateRequest, ScoreRequest
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.rollout.engines.embedded.server.decode.decoder import Decoder
from fathom.rollout.engines.embedded.server.decode.forward import Batch, Scores
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet

_VOCAB, _PROMPT, _STEPS, _WARM = 512, 32, 200, 20
_PAGE_TOKENS = 32


@final
class StillForward:
    """See `Forward`: answers at once, always the same."""

    vocab_size = _VOCAB
    dtype = "float32"
    kernels = "still"
    has_experts = False

    def __init__(self, batch: int) -> None:
        """Logits for at most `batch` sequences."""
        self._logits = torch.randn(batch, _VOCAB, generator=torch.Generator().manual_seed(0))

    def use(self, weights: WeightSet) -> None:
        """See `Forward.use`."""

    def logits(self, weights: WeightSet, batch: Batch) -> Tensor:
        """See `Forward.logits`."""
        return self._logits[: len(batch.sampled)]

    def routes(self, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Never asked for: it has no experts."""
        raise AssertionError("a still forward has no routes")

    def copy_page(self, from_page: int, to_page: int) -> None:
        """See `Forward.copy_page`."""

    def score(self, weights: WeightSet, request: ScoreRequest) -> Scores:
        """Never asked for: only steps are measured."""
        raise AssertionError("a still forward scores nothing")


def step_overhead_s(batch: int) -> float:
    """Mean seconds of a step in which `batch` sequences sample a token each, the forward taking none."""
    tokens = _PROMPT + _WARM + _STEPS
    decoder = Decoder(
        EngineId("still"),
        StillForward(batch),
        slots=batch,
        max_tokens=tokens,
        step_tokens=batch * _PROMPT,
        pages=batch * (tokens // _PAGE_TOKENS + 1),
        page_tokens=_PAGE_TOKENS,
    )
    live = WeightSet(tensors={}, version=PolicyVersion(incarnation=1, number=0, digest=""))
    for index in range(batch):
        decoder.start(Job(request=_request(index), stream=asyncio.Queue(), arrived_s=time.monotonic(), pinned=None))
    with torch.inference_mode():
        for _ in range(_WARM):
            decoder.step(live)
        began = time.perf_counter()
        for _ in range(_STEPS - 1):
            decoder.step(live)
        return (time.perf_counter() - began) / (_STEPS - 1)


def _request(index: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(index),
        prompt_ids=np.random.default_rng(index).integers(0, _VOCAB, _PROMPT).astype(np.int32),
        sampling=SamplingParams(),
        seed=index,
        max_new_tokens=_WARM + _STEPS,
        stop_ids=(),
        priority=index,
        session_key=str(index),
        purpose=Purpose.PROBE,
    )
