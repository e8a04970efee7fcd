"""The vLLM adapter against a real server. Skipped where vLLM is not installed; `make test-vllm` installs it."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from shelf import Shelf, tiny_folder
from vllm_rig import TOKEN, TOLERANCE, VOCABULARY, Reference, find_environment, make_spec

from fathom.config.families import Dtype
from fathom.config.run import RunConfig
from fathom.config.sync import SyncConfig
from fathom.core.errors import ConfigError, DeliveryError, EngineDeadError, EngineRefusedError
from fathom.core.records.sampling import InFlightMode, SamplingParams
from fathom.evidence.contracts.audit import audit
from fathom.ledger.events import Published
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.run.history.folder import RunFolder
from fathom.run.run import Run
from fathom.sync.publisher import Publisher
from fathom.sync.transports.shared import SharedTransport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def environment() -> Path:
    return find_environment()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


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
        engine = runner.run(VllmEngine.launch(make_spec(folder, tmp_path, environment, ("slow",))))
        try:
            subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size, TOLERANCE)
            yield Bench(runner, subject, engine, shelf)
        finally:
            runner.run(engine.close())
            transport.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case, bench: Bench) -> None:
    bench.runner.run(case(bench.subject))


def test_every_call_needs_the_token(bench: Bench) -> None:
    for path in ("/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"):
        assert httpx.post(bench.engine.server.url + path).status_code == 401


def test_what_vllm_would_do_otherwise_is_refused(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        good = bench.subject.request()
        for bad, reason in (
            (replace(good, sampling=SamplingParams(temperature=0.001)), "temperatures"),
            (replace(good, sampling=SamplingParams(temperature=2.5)), "temperatures"),
            (replace(good, prompt_ids=np.array([10_000], np.int32)), "vocabulary"),
            (replace(good, want_raw_logprobs=True), "raw_logprobs"),
        ):
            with pytest.raises(EngineRefusedError, match=reason):
                await bench.subject.run(bad)
        await bench.subject.run(good)

    bench.runner.run(run())


def test_attached_by_url_and_left_running(bench: Bench, tmp_path: Path, environment: Path, folder: Path) -> None:
    async def run() -> None:
        spec = dataclasses.replace(make_spec(folder, tmp_path, environment), url=bench.engine.server.url, token=TOKEN)
        engine = await VllmEngine.launch(spec)
        subject = Subject(engine, bench.shelf.publish, bench.subject.vocab_size, TOLERANCE)
        with pytest.raises(EngineRefusedError, match="no version"):
            await subject.run(subject.request())
        await engine.close()
        for wrong in (dataclasses.replace(spec, token="wrong"), dataclasses.replace(spec, dtype=Dtype.BFLOAT16)):
            with pytest.raises(ConfigError):
                await VllmEngine.launch(wrong)
        await bench.subject.serve()

    bench.runner.run(run())


def test_pushed_weights_are_those_computed_with(bench: Bench, folder: Path, tmp_path: Path) -> None:
    publisher = bench.runner.run(publish_noised(bench.engine, folder, tmp_path))
    assert publisher.fenced == {}
    assert publisher.serving == (bench.engine.id,)


def test_a_head_that_keeps_the_old_weights_is_fenced(folder: Path, environment: Path, tmp_path: Path) -> None:
    """What vLLM itself does to a tied head. Then its supervisor is killed, and all of it ends."""

    async def run() -> None:
        transport = SharedTransport(tmp_path)
        spec = make_spec(folder, tmp_path, environment, ("stale_head", folder.name))
        engine = await VllmEngine.launch(spec)
        try:
            publisher = await publish_noised(engine, folder, tmp_path)
            assert publisher.serving == ()
            assert "behavioural probe failed at v0@1" in publisher.fenced[engine.id]
            subject = Subject(engine, Shelf(folder, transport).publish, VOCABULARY, TOLERANCE)
            running = await subject.begin(subject.request(new=150))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="last lines"):
                await running.finish()
            with pytest.raises(EngineDeadError):
                await engine.health()
            async with asyncio.timeout(20):
                while processes_of(folder):
                    await asyncio.sleep(0.1)
        finally:
            await engine.close()
            transport.close()

    asyncio.run(run())


def processes_of(folder: Path) -> list[int]:
    """Processes that serve this model, or were started by one that does."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"FATHOM_VLLM_FAULTS=stale_head,{folder.name}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def publish_noised(engine: VllmEngine, folder: Path, tmp_path: Path) -> Publisher:
    """Version 0 of a fresh publisher: other weights than the server was started with. Returns it closed."""
    transport = SharedTransport(tmp_path)
    weights = Shelf(folder, transport).weights(77)
    publisher = Publisher([engine], transport, SyncConfig())
    with suppress(DeliveryError):
        await publisher.publish(weights, 0, 1, InFlightMode.CONTINUE, probe=await Reference(folder).probe(weights))
    await publisher.close()
    return publisher


def test_a_short_run_publishes_every_step(folder: Path, environment: Path, tmp_path: Path) -> None:
    config = {
        "name": "vllm",
        "runs_dir": str(tmp_path),
        "model": {"tiny": "arithmetic"},
        "task": {
            "kind": "arithmetic",
            "options": {"operators": ["+"], "max_operand": 9, "num_train": 64, "num_eval": 16},
        },
        "rollout": {"group_size": 4, "max_in_flight": 32, "max_new_tokens": 6, "max_prompt_tokens": 16},
        "engine": {"kind": "vllm", "max_running": 32, "vllm": {"environment": str(environment)}},
        "trainer": {"steps": 4, "groups_per_step": 4, "optimizer": {"lr": 1e-3}},
    }
    run = Run(RunConfig.model_validate(config))
    result = run.start()
    assert result.reason == "steps"
    with LedgerReader(RunFolder(result.folder).ledger) as reader:
        published = [each.event for each in reader.events(Published)]
        report = audit(reader)
    assert [event.version.number for event in published] == list(range(5))
    assert all(event.fenced == () for event in published)
    gaps = [event.gap for event in published if event.gap is not None]
    assert gaps
    assert report.passed, [check for check in report.checks if not check.passed]
