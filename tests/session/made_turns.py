"""Turns as an engine would answer them, made by hand."""

import numpy as np

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateEnd
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.rollout.sampled import Sampled, prompt_hash


def turn(prompt_ids: np.ndarray, token_ids: list[int], version: int = 0) -> Sampled:
    count = len(token_ids)
    return Sampled(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        policy_version=np.full(count, version, np.int32),
        kv_version=np.full(count, version, np.int32),
        kept=None,
        raw_logprobs=None,
        routes=None,
        routed=0,
        versions=(PolicyVersion(incarnation=1, number=version, digest=f"d{version}"),),
        sampling=SamplingParams(),
        end=GenerateEnd(
            finish_reason=FinishReason.STOP,
            engine=EngineId("e"),
            dtype="float32",
            kernels="plain",
            prompt_hash=prompt_hash(prompt_ids),
            cached_tokens=0,
            drafted_tokens=0,
            accepted_tokens=0,
            queue_s=0.0,
            generate_s=0.0,
        ),
    )
