"""Adapters on engines under test: what the trainer says of some tokens, and what an engine says of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fathom.config.lora import LoraConfig
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import Engine, ScoreRequest
from fathom.core.records.sampling import InFlightMode
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import head_outputs

FORM = LoraConfig(rank=4, alpha=12.0).form("tests")
TOKENS = np.arange(3, 30, dtype=np.int32) % 17
POSITIONS = np.arange(1, len(TOKENS))


def trained(model: LanguageModel, weights: Mapping[str, torch.Tensor], tokens: np.ndarray = TOKENS) -> np.ndarray:
    """What base + adapter says of all tokens but the first, computed by the trainer's model."""
    model.use(weights)
    total = len(tokens)
    with torch.no_grad():
        hidden = model.hidden(torch.from_numpy(tokens).long(), torch.arange(total), PackedAttention([total]))
        ones = torch.ones(total - 1)
        return head_outputs(model, hidden[:-1], torch.from_numpy(tokens[1:]).long(), ones, None, None).logprobs.numpy()


async def scored(engine: Engine, name: str) -> np.ndarray:
    ones = np.ones(len(POSITIONS), np.float32)
    request = ScoreRequest(
        request_id=name, token_ids=TOKENS, positions=POSITIONS, temperature=ones, kept=None, bias=None
    )
    return (await engine.score(request)).logprobs


async def serve(engine: Engine, manifest: Manifest, source: WeightSource) -> None:
    await engine.stage(manifest, source)
    assert (await engine.verify()).digest == manifest.version.digest
    await engine.commit(manifest.version, InFlightMode.DRAIN)
