import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, WeightSource
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.sync.digest import build_manifest
from fathom.sync.transports.shared import SharedTransport
from fathom.text.characters import save_character_tokenizer

CONTEXT = 192


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    save_character_tokenizer(folder)
    make_tiny("arithmetic", 0, folder)
    return folder


def spec(folder: Path, log_path: Path) -> EmbeddedSpec:
    return EmbeddedSpec(
        engine=EngineId("e0"), model_folder=folder, log_path=log_path, max_context_tokens=CONTEXT, max_running=16
    )


class Shelf:
    """Versions of the tiny model: version n is the folder's, with noise of seed n."""

    def __init__(self, folder: Path, run_folder: Path) -> None:
        self.model = LanguageModel.load(folder, torch.float32, "cpu")
        self._transport = SharedTransport(run_folder)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        named = self.model.weights()
        return {k: v.detach() + 0.05 * torch.randn(v.shape, generator=generator) for k, v in named.items()}

    async def publish(self, number: int) -> tuple[Manifest, WeightSource]:
        weights = self.weights(number)
        manifest = build_manifest(number, 1, None, weights)
        source = self._transport.publish(manifest, weights)
        self._transport.release(manifest.version)
        return manifest, source

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def launched(folder: Path, tmp_path: Path) -> AsyncIterator[Subject]:
    shelf = Shelf(folder, tmp_path)
    engine = await EmbeddedEngine.launch(spec(folder, tmp_path / "engine.log"))
    try:
        yield Subject(engine, shelf.publish, shelf.model.shape.vocab_size)
    finally:
        await engine.close()
        shelf.close()


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Subject]]:
    """One process for all cases, and the event loop its client lives in."""
    with asyncio.Runner() as runner:
        context = launched(folder, tmp_path_factory.mktemp("run"))
        subject = runner.run(context.__aenter__())
        yield runner, subject
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case, shared: tuple[asyncio.Runner, Subject]) -> None:
    runner, subject = shared
    runner.run(case(subject))
