"""vLLM servers under test: where vLLM is, how one is started, and what a fresh one would answer."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fathom.config.families import Dtype
from fathom.core.ids import EngineId
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.rollout.engines.vllm.launch.environment import default_folder, installed
from fathom.rollout.engines.vllm.launch.process import MODEL
from fathom.rollout.engines.vllm.spec import VllmSpec
from fathom.sync.probe import TOLERANCES, Probe

CONTEXT = 192
TOKEN = "a-token-for-tests"
TOLERANCE = 1e-4
"""Its kernels add in another order for one row than for several: 1e-5 nats were seen."""
VOCABULARY = 52

Answer = tuple[list[int], list[float]]
"""Greedily sampled tokens, and log-probabilities as the server wrote them."""


def find_environment() -> Path:
    """FATHOM_VLLM_ENVIRONMENT names another folder than the default one."""
    folder = Path(os.environ.get("FATHOM_VLLM_ENVIRONMENT") or default_folder())
    if installed(folder) is None:
        pytest.skip(f"no vLLM environment in {folder}; `make test-vllm` makes one")
    return folder


def make_spec(folder: Path, tmp_path: Path, environment: Path, faults: tuple[str, ...] = ()) -> VllmSpec:
    return VllmSpec(
        engine=EngineId("v0"),
        model_folder=folder,
        log_path=tmp_path / "engine.log",
        environment=environment,
        max_context_tokens=CONTEXT,
        max_running=16,
        kv_memory_mb=64,
        faults=faults,
        token=TOKEN,
    )


class Reference:
    """The definition of the model itself, without any of our forward."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def probe(self, weights: dict[str, torch.Tensor]) -> Probe:
        """What an engine must answer under these weights."""
        self._model.load_state_dict(weights, strict=False)

        async def score(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [self._logprobs(text) for text in texts]

        tolerance = TOLERANCES[Dtype.FLOAT32]
        return await Probe.prepare(score, vocab_size=VOCABULARY, longest=CONTEXT, tolerance=tolerance)

    def save(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """A model folder that holds these weights."""
        self._model.load_state_dict(weights, strict=False)
        self._model.save_pretrained(folder)

    @torch.no_grad()
    def _logprobs(self, text: np.ndarray) -> np.ndarray:
        logprobs = self._model(torch.from_numpy(text).long()[None]).logits[0].log_softmax(-1)
        return logprobs[torch.arange(len(text) - 1), torch.from_numpy(text[1:]).long()].numpy()


async def answers(engine: VllmEngine, label: str) -> list[Answer]:
    """What the server computes, asked past the adapter, one request after the other: the batch makes bits differ."""
    found: list[Answer] = []
    for index, prompt in enumerate(([1, 5, 9, 4, 7, 3, 8, 2], [7, 7, 1], list(range(40)))):
        sampling = {"temperature": 0.0, "max_tokens": 48, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        name = f"{label}.{index}"
        body = {"request_id": name, "model": MODEL, "token_ids": prompt, "sampling_params": sampling}
        choice = (await engine.server.answer(body | {"cache_salt": name})).choices[0]
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        found.append((list(choice.token_ids), [place.logprob for place in choice.logprobs.content]))
    return found
