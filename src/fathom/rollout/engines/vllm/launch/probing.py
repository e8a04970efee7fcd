"""What a server can do, found by asking it to, before it serves anybody."""

from __future__ import annotations

import math
from typing import Any

from fathom.core.errors import ConfigError, EngineError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Capabilities, DigestKind, ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.vllm.launch.process import MODEL
from fathom.rollout.engines.vllm.server import VllmServer
from fathom.rollout.engines.vllm.wire import Answer, Facts

_PROTOCOL = 2
_PROMPT = [1, 2, 3, 4]
_NATS = 0.1
"""Generating and scoring may differ by so much here; the wrong distribution differs by more."""


async def probe(server: VllmServer, engine: EngineId, *, adapters: bool) -> tuple[Facts, Capabilities]:
    """Facts and capabilities of a server that holds no version yet. `adapters`: it was started with one.

    Raises:
        ConfigError: it lacks what every engine must have; the message says how to start it.
    """
    try:
        facts = await server.prepare()
        if facts.protocol != _PROTOCOL or facts.world_size != 1:
            raise _unusable(engine, f"worker protocol {facts.protocol}, {facts.world_size} processes share the model")
        sampled = await server.answer(_generation(f"{engine}/probe/0", temperature=0.5, top_k=2))
        scores = await server.answer(_scoring(f"{engine}/probe/1", sampled, temperature=0.5))
        await server.pause()
        frozen = await server.paused()
        await server.resume()
    except EngineError as error:
        raise _unusable(engine, error.reason) from error
    if not frozen:
        raise _unusable(engine, "it does not pause")
    if facts.weight_transfer != "fathom":
        raise _unusable(engine, f"its weight-transfer backend is {facts.weight_transfer!r}")
    if sampled.choices[0].weight_versions is None:
        raise _unusable(engine, "it does not say which version made a token")
    return facts, Capabilities(
        kept_sets=_tells_kept_sets(engine, sampled, scores),
        routes=False,
        kv_versions=True,
        raw_logprobs=False,
        barriers=False,
        pinned_versions=False,
        double_buffered=False,
        receives_into=ReceivesInto.STAGING,
        in_flight=frozenset(InFlightMode),
        transports=frozenset({"shared", "disk", "broadcast", "delta"}),
        digest=DigestKind.RECEIVED,
        adapters=adapters,
        max_context_tokens=facts.max_model_len - 1,  # scoring a sequence samples one token more
    )


def _tells_kept_sets(engine: EngineId, sampled: Answer, scores: Answer) -> bool:
    """True: a truncated distribution comes back whole. Raises ConfigError when log-probabilities are of another one."""
    logprobs = sampled.choices[0].logprobs
    scored = scores.prompt_logprobs[-1] if scores.prompt_logprobs else None
    if logprobs is None or not logprobs.content or scored is None:
        raise _unusable(engine, "it returns no log-probabilities")
    place = logprobs.content[0]
    kept = [each for each in place.top_logprobs if each.logprob > -9998]
    if abs(scored[place.token_id].logprob - place.logprob) > _NATS:
        raise _unusable(engine, "its log-probabilities are not of the distribution sampled from")
    return len(kept) == 2 and math.isclose(sum(math.exp(each.logprob) for each in kept), 1.0, abs_tol=1e-3)


def _generation(name: str, *, temperature: float, top_k: int) -> dict[str, Any]:
    sampling = {"temperature": temperature, "top_k": top_k, "seed": 1, "max_tokens": 1, "logprobs": 4}
    return {
        "request_id": name,
        "model": MODEL,
        "token_ids": _PROMPT,
        "sampling_params": sampling | {"ignore_eos": True, "detokenize": False},
    }


def _scoring(name: str, sampled: Answer, *, temperature: float) -> dict[str, Any]:
    """The sampled token, scored over the kept set it was sampled from."""
    choice = sampled.choices[0]
    places = choice.logprobs.content if choice.logprobs is not None else None
    kept = [each.token_id for place in places or () for each in place.top_logprobs if each.logprob > -9998]
    tokens = [*_PROMPT, *(choice.token_ids or ())]
    asked = {"temperature": [temperature] * len(tokens), "kept": {str(len(_PROMPT)): kept}}
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
    return {
        "request_id": name,
        "model": MODEL,
        "token_ids": tokens,
        "sampling_params": sampling | {"extra_args": {"fathom_score": asked}},
    }


def _unusable(engine: EngineId, reason: str) -> ConfigError:
    return ConfigError(
        f"engine {engine}: this vLLM server cannot be used: {reason}; start it as docs/how-to/vllm.md says, or let "
        "Fathom start one (remove engine.vllm.url)"
    )
