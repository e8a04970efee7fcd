"""From the port's requests to vLLM's, and why some of them cannot be served exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import GenerateRequest, ScoreRequest
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.vllm.wire import SampledLogprob

LARGEST_KEPT = 1024
"""Most kept ids of one token that can be recorded where `top_k` sets no smaller limit."""
_TIES = 64
"""Room for tokens as likely as the k-th: vLLM keeps all of them."""
_REMOVED = -9998.0
"""vLLM writes -9999 for tokens that were removed."""
_TEMPERATURES = (0.01, 2.0)
"""vLLM samples by another temperature than the one asked for below this, and refuses above."""


def why_not_exact(request: GenerateRequest) -> str | None:
    """What of a generation vLLM would do differently from what the port says. None: nothing."""
    sampling = request.sampling
    low, high = _TEMPERATURES
    if not low <= sampling.temperature <= high:
        return f"vLLM samples at temperatures from {low} to {high} only, got {sampling.temperature}"
    return None


def generate_body(
    request: GenerateRequest, version: PolicyVersion, room: int, vocab_size: int, model: str
) -> dict[str, Any]:
    """The generation, to be streamed.

    Args:
        request: the port's request.
        version: what serves. Prefixes are shared within a version only, so that no old one can be read.
        room: tokens that the context leaves.
        vocab_size: rows of the output head.
        model: the name of what is to serve it: the model, or its adapter.
    """
    sampling = request.sampling
    return {
        "request_id": request.request_id,
        "model": model,
        "token_ids": request.prompt_ids.tolist(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": f"{version.incarnation}.{version.number}.{version.digest}",
        "priority": request.priority,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": request.seed,
            "max_tokens": min(request.max_new_tokens, room),
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": looked_at(request, vocab_size),
            "extra_args": {"fathom_min_p": sampling.min_p} if sampling.min_p > 0 else None,
        },
    }


def looked_at(request: GenerateRequest, vocab_size: int) -> int:
    """How many of the likeliest tokens are asked for at each place, so that the kept set can be told."""
    if not request.sampling.truncates:
        return 0
    return min(vocab_size, (request.sampling.top_k or LARGEST_KEPT) + _TIES)


def kept_sets(places: list[SampledLogprob], asked: int, vocab_size: int) -> KeptSets:
    """Kept sets of some places.

    Raises:
        ValueError: more tokens survived than were asked for, so that they are not known.
    """
    rows: list[list[int]] = []
    for place in places:
        kept = sorted(each.token_id for each in place.top_logprobs if each.logprob > _REMOVED)
        if len(kept) >= asked and asked < vocab_size:
            raise ValueError(f"more than {asked} tokens survived truncation at one place; set rollout.sampling.top_k")
        rows.append(kept if len(kept) < vocab_size else [])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=np.array([token for row in rows for token in row], np.int32))


def score_body(request: ScoreRequest, model: str) -> dict[str, Any]:
    """The scoring: a prompt whose log-probabilities are asked for, and one token that nobody looks at. `model`: see
    `generate_body`."""
    temperature = np.ones(len(request.token_ids), np.float32)
    temperature[request.positions] = request.temperature
    kept: dict[str, list[int]] = {}
    if request.kept is not None:
        for index, position in enumerate(request.positions.tolist()):
            ids = request.kept.of(index)
            if ids is not None:
                kept[str(position)] = ids.tolist()
    return {
        "request_id": request.request_id,
        "model": model,
        "token_ids": request.token_ids.tolist(),
        "sampling_params": {
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
            "extra_args": {"fathom_score": {"temperature": temperature.tolist(), "kept": kept}},
        },
    }
