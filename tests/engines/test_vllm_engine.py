"""The vLLM adapter against a real server. Skipped where vLLM is not installed; `make test-vllm` installs it."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from shelf import Shelf, tiny_folder

from fathom.core.ids import EngineId
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.rollout.engines.vllm.environment import default_folder, installed
from fathom.rollout.engines.vllm.spec import VllmSpec
from fathom.sync.transports.shared import SharedTransport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONTEXT = 192
TOLERANCE = 1e-4
"""Its kernels add in another order for one row than for several: 1e-5 nats were seen."""


@pytest.fixture(scope="module")
def environment() -> Path:
    """FATHOM_VLLM_ENVIRONMENT names another folder than the default one."""
    folder = Path(os.environ.get("FATHOM_VLLM_ENVIRONMENT") or default_folder())
    if installed(folder) is None:
        pytest.skip(f"no vLLM environment in {folder}; `make test-vllm` makes one")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def make_spec(folder: Path, tmp_path: Path, environment: Path) -> VllmSpec:
    return VllmSpec(
        engine=EngineId("v0"),
        model_folder=folder,
        log_path=tmp_path / "engine.log",
        environment=environment,
        max_context_tokens=CONTEXT,
        max_running=16,
        kv_memory_mb=64,
        faults=("slow",),
    )


@dataclass
class Bench:
    """A launched engine, and the event loop that its client lives in."""

    runner: asyncio.Runner
    subject: Subject
    engine: VllmEngine
    shelf: Shelf


@pytest.fixture(scope="module")
def bench(folder: Path, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server for all tests that leave it well."""
    tmp_path = tmp_path_factory.mktemp("run")
    transport = SharedTransport(tmp_path)
    shelf = Shelf(folder, transport)
    with asyncio.Runner() as runner:
        engine = runner.run(VllmEngine.launch(make_spec(folder, tmp_path, environment)))
        try:
            subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size, TOLERANCE)
            yield Bench(runner, subject, engine, shelf)
        finally:
            runner.run(engine.close())
            transport.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case, bench: Bench) -> None:
    bench.runner.run(case(bench.subject))
