"""Rows, groups and a model folder made from a seed, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.step import GroupBatch
from fathom.core.records.trajectory import KeptSets

VOCAB = 23


def save_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Hugging Face folder of a very small random model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_row(
    rng: np.random.Generator,
    trajectory: str = "t0",
    *,
    prompt: int = 4,
    sampled: int = 5,
    branch: int = 0,
    version: int = 0,
    kv_version: int | None = None,
    kept: bool = False,
) -> Row:
    """A random row; its behaviour log-probabilities are plausible, not exact."""
    ids = rng.integers(0, VOCAB, prompt + sampled).astype(np.int32)
    return Row(
        trajectory=TrajectoryId(trajectory),
        group=GroupId("g0"),
        branch=branch,
        token_ids=ids,
        positions=np.arange(prompt, prompt + sampled),
        logprobs=rng.uniform(-4.0, -1.0, sampled).astype(np.float32),
        policy_version=np.full(sampled, version, np.int32),
        kv_version=np.full(sampled, version if kv_version is None else kv_version, np.int32),
        temperature=np.full(sampled, 1.0, np.float32),
        kept=_kept(rng, ids[prompt:]) if kept else None,
        bias=None,
        routes=None,
        mixed_routes=None,
    )


def make_group(
    rows: Sequence[Row], rewards: Sequence[float], name: str = "g0", truncated: Sequence[str] = ()
) -> GroupBatch:
    """A group of these rows; rewards go to the trajectories in order of appearance."""
    trajectories = list(dict.fromkeys(row.trajectory for row in rows))
    return GroupBatch(
        group=GroupId(name),
        rewards=dict(zip(trajectories, rewards, strict=True)),
        truncated=frozenset(map(TrajectoryId, truncated)),
        rows=tuple(rows),
    )


def _kept(rng: np.random.Generator, sampled: np.ndarray) -> KeptSets:
    sets = [np.union1d(rng.choice(VOCAB, 6, replace=False), [token]).astype(np.int32) for token in sampled]
    return KeptSets(offsets=np.cumsum([0, *map(len, sets)]).astype(np.int64), ids=np.concatenate(sets))
