"""One batch by `generate` of transformers, timed, in a process of its own. It returns no log-probabilities.

Reads one line of JSON (`GenerateRequest`); the last line it prints is the number of seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from fathom.bench.peers.generate_request import GenerateRequest
from fathom.config.families import Dtype

_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
_WARM_TOKENS = 8


def main() -> None:
    """Serve one request."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=GenerateRequest)
    torch.set_num_threads(request.threads)
    model = AutoModelForCausalLM.from_pretrained(request.model, dtype=_DTYPES[request.dtype])
    ids = torch.tensor(request.prompts)
    _run(model, ids, _WARM_TOKENS)
    began = time.perf_counter()
    _run(model, ids, request.max_new_tokens)
    print(time.perf_counter() - began)


def _run(model: Any, ids: torch.Tensor, tokens: int) -> None:
    mask = torch.ones_like(ids)
    model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, min_new_tokens=tokens, max_new_tokens=tokens
    )


if __name__ == "__main__":
    main()
