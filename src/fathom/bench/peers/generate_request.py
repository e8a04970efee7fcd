"""What `generate` of transformers is asked to do."""

from __future__ import annotations

import msgspec

from fathom.config.families import Dtype


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate_request.1"):
    """One batch, generated twice: a few tokens to warm up, then all of them against the clock."""

    model: str
    """Hugging Face folder."""
    dtype: Dtype
    """Element type of the weights."""
    threads: int
    """CPU threads."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, all of one length: one batch."""
    max_new_tokens: int
    """Exactly this many are sampled for each."""
