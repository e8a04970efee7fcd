"""How many pages of KV memory an engine takes."""

from __future__ import annotations

import torch

from fathom.core.errors import ConfigError
from fathom.model.language_model import ModelShape
from fathom.model.paged_attention import PAGE_TOKENS

_MIB = 2**20
_DEFAULT_MB = 4096
"""Most that is taken unasked."""


def kv_pages(memory_mb: int | None, shape: ModelShape, dtype: torch.dtype, slots: int, max_tokens: int) -> int:
    """Pages for `memory_mb` MiB; by default for `slots` sequences of `max_tokens`, or 4 GiB, but one sequence at least.

    Raises:
        ConfigError: one sequence of `max_tokens` tokens does not fit into `memory_mb`.
    """
    per_token = shape.layers * shape.kv_heads * (shape.head_dim + shape.value_head_dim) * dtype.itemsize
    page_bytes = per_token * PAGE_TOKENS
    one = -(-max_tokens // PAGE_TOKENS)
    if memory_mb is None:
        return max(one, min(slots * one, _DEFAULT_MB * _MIB // page_bytes))
    pages = memory_mb * _MIB // page_bytes
    if pages < one:
        least = -(-one * page_bytes // _MIB)
        raise ConfigError(
            f"engine.kv_memory_mb = {memory_mb} holds KV of {pages * PAGE_TOKENS} tokens, and a sequence may "
            f"have {max_tokens}; set at least {least}, or lower rollout.max_prompt_tokens or rollout.max_new_tokens"
        )
    return pages
