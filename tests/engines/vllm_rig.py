"""vLLM servers under test: where vLLM is, how one is started, and what a fresh one would answer."""

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from shelf import Shelf, tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM

from fathom.config.families import Dtype
from fathom.core.ids import EngineId
from fathom.rollout.engines.conformance import Subject
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.rollout.engines.vllm.launch.environment import default_folder, installed
from fathom.rollout.engines.vllm.launch.process import MODEL
from fathom.rollout.engines.vllm.spec import VllmSpec
from fathom.sync.probe import TOLERANCES, Probe
from fathom.sync.transports.shared import SharedTransport

CONTEXT = 192
TOKEN = "a-token-for-tests"
TOLERANCE = 1e-4
"""Its kernels add in another order for one row than for several: 1e-5 nats were seen."""
VOCABULARY = 52

Weights = dict[str, torch.Tensor]
Answer = tuple[list[int], list[float]]
"""Greedily sampled tokens, and log-probabilities as the server wrote them."""
_names = itertools.count()


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

    def weights(self) -> Weights:
        """What it holds, tied names resolved to one."""
        tied = self._model.config.tie_word_embeddings
        held = self._model.state_dict()
        return {name: held[name].clone() for name in held if not (tied and name == "lm_head.weight")}

    async def probe(self, weights: Weights) -> Probe:
        """What an engine must answer under these weights."""
        self._model.load_state_dict(weights, strict=False)

        async def score(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [self._logprobs(text) for text in texts]

        tolerance = TOLERANCES[Dtype.FLOAT32]
        return await Probe.prepare(score, vocab_size=VOCABULARY, longest=CONTEXT, tolerance=tolerance)

    def save(self, weights: Weights, folder: Path) -> None:
        """A model folder that holds these weights."""
        self._model.load_state_dict(weights, strict=False)
        self._model.save_pretrained(folder)

    @torch.no_grad()
    def _logprobs(self, text: np.ndarray) -> np.ndarray:
        logprobs = self._model(torch.from_numpy(text).long()[None]).logits[0].log_softmax(-1)
        return logprobs[torch.arange(len(text) - 1), torch.from_numpy(text[1:]).long()].numpy()


def untied_folder(folder: Path) -> Path:
    """The tiny model with an output head of its own."""
    config: Any = AutoConfig.from_pretrained(tiny_folder(folder))
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@dataclass
class Bench:
    """A launched engine, and the event loop that its client lives in."""

    runner: asyncio.Runner
    subject: Subject
    engine: VllmEngine
    shelf: Shelf
    folder: Path
    """Of its model."""

    @classmethod
    @contextmanager
    def opened(cls, spec: VllmSpec) -> Iterator[Self]:
        """Launch it; end it."""
        folder = spec.model_folder
        transport = SharedTransport(spec.log_path.parent)
        shelf = Shelf(folder, transport, adapter=spec.adapter)
        with asyncio.Runner() as runner:
            engine = runner.run(VllmEngine.launch(spec))
            try:
                yield cls(runner, Subject(engine, shelf.publish, VOCABULARY, TOLERANCE), engine, shelf, folder)
            finally:
                runner.run(engine.close())
                transport.close()


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """FATHOM_VLLM_ENVIRONMENT names another folder than the default one."""
    folder = Path(os.environ.get("FATHOM_VLLM_ENVIRONMENT") or default_folder())
    if installed(folder) is None:
        pytest.skip(f"no vLLM environment in {folder}; `make test-vllm` makes one")
    return folder


@pytest.fixture(scope="session")
def vllm_bench(vllm_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server, of a model with a tied head, for all tests that leave it well: a start takes long."""
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    with Bench.opened(make_spec(folder, tmp_path_factory.mktemp("run"), vllm_environment, ("slow",))) as bench:
        yield bench


async def answers(engine: VllmEngine) -> list[Answer]:
    """What the server computes, asked past the adapter, one request after the other: the batch makes bits differ."""
    found: list[Answer] = []
    for prompt in ([1, 5, 9, 4, 7, 3, 8, 2], [7, 7, 1], list(range(40))):
        sampling = {"temperature": 0.0, "max_tokens": 48, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        name = f"answers.{next(_names)}"
        body = {"request_id": name, "model": MODEL, "token_ids": prompt, "sampling_params": sampling}
        choice = (await engine.server.answer(body | {"cache_salt": name})).choices[0]
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        found.append((list(choice.token_ids), [place.logprob for place in choice.logprobs.content]))
    return found
