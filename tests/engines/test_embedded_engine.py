import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import torch
from shelf import Shelf, tiny_folder

from fathom.config.families import Dtype, Speculation
from fathom.core.errors import ConfigError, EngineDeadError, EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Barrier, ScoreRequest
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.sync.transports.disk import DiskTransport
from fathom.sync.transports.shared import SharedTransport
from fathom.text.tokenizer import Tokenizer

CONTEXT = 192


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def make_spec(folder: Path, tmp_path: Path) -> EmbeddedSpec:
    return EmbeddedSpec(
        engine=EngineId("e0"),
        model_folder=folder,
        log_path=tmp_path / "engine.log",
        max_context_tokens=CONTEXT,
        max_running=16,
        call_timeout_s=2.0,
    )


@dataclass
class Bench:
    """A launched engine, and the event loop that its client lives in."""

    runner: asyncio.Runner
    subject: Subject
    engine: EmbeddedEngine
    shelf: Shelf


@asynccontextmanager
async def launched(spec: EmbeddedSpec, shelf: Shelf) -> AsyncIterator[EmbeddedEngine]:
    engine = await EmbeddedEngine.launch(spec)
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def benched(spec: EmbeddedSpec, tmp_path: Path) -> Iterator[Bench]:
    """One process for all tests that leave it well."""
    transport = SharedTransport(tmp_path)
    shelf = Shelf(spec.model_folder, transport)
    with asyncio.Runner() as runner:
        context = launched(spec, shelf)
        engine = runner.run(context.__aenter__())
        decode = Tokenizer.load(spec.model_folder).decode
        subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size, decode=decode)
        yield Bench(runner, subject, engine, shelf)
        runner.run(context.__aexit__(None, None, None))
    assert not engine.process.alive
    transport.close()


@pytest.fixture(scope="module")
def bench(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    tmp_path = tmp_path_factory.mktemp("run")
    with benched(make_spec(folder, tmp_path), tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def pressed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """KV memory for less than three of its sixteen sequences."""
    tmp_path = tmp_path_factory.mktemp("pressed")
    with benched(replace(make_spec(folder, tmp_path), kv_memory_mb=1, step_tokens=24), tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def drafting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """With speculation."""
    tmp_path = tmp_path_factory.mktemp("drafting")
    with benched(replace(make_spec(folder, tmp_path), speculation=Speculation.NGRAM), tmp_path) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case, bench: Bench) -> None:
    bench.runner.run(case(bench.subject))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance_with_too_little_memory(case: Case, pressed: Bench) -> None:
    pressed.runner.run(case(pressed.subject))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance_with_speculation(case: Case, drafting: Bench) -> None:
    drafting.runner.run(case(drafting.subject))


def test_a_draft_model_drafts_and_one_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        spec = replace(make_spec(folder, tmp_path), speculation=Speculation.DRAFT_MODEL, draft_model_folder=folder)
        shelf = Shelf(folder, DiskTransport(tmp_path))
        async with launched(spec, shelf) as engine:
            subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size)
            manifest, source = await shelf.publish_weights(1, shelf.model.weights())
            await engine.stage(manifest, source)
            await engine.verify()
            await engine.commit(manifest.version, InFlightMode.CONTINUE)
            done = await subject.run(subject.request(new=100))
            assert done.end.accepted_tokens > 70, "nearly all: both models are the same"
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(ConfigError, match=f"{other} has no config.json"):
            await EmbeddedEngine.launch(replace(spec, draft_model_folder=other))

    asyncio.run(run())


def test_every_call_needs_the_token(bench: Bench) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.post(f"{bench.engine.process.url}/status", headers=headers).status_code == 401


def test_one_attaches_to_an_engine_that_somebody_else_started(bench: Bench) -> None:
    async def run() -> None:
        process = bench.engine.process
        other = await EmbeddedEngine.attach(process.url, process.spec.token)
        assert (other.id, other.capabilities) == (bench.engine.id, bench.engine.capabilities)
        version = await bench.subject.serve()
        subject = Subject(other, bench.shelf.publish, bench.subject.vocab_size)
        done = await subject.run(bench.subject.request(new=2))
        assert set(done.policy_version.tolist()) == {version.number}
        await other.close()
        await bench.engine.health()
        with pytest.raises(EngineRefusedError, match="token is missing or wrong"):
            await EmbeddedEngine.attach(process.url, "wrong")

    bench.runner.run(run())


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1", ""])
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of an engine"):
        asyncio.run(EmbeddedEngine.attach(url, "token"))


def test_where_no_engine_listens_none_is_attached_to() -> None:
    with pytest.raises(EngineError, match="status failed"):
        asyncio.run(EmbeddedEngine.attach("http://127.0.0.1:1", "token"))


def test_ctrl_c_is_the_parents_business(bench: Bench) -> None:
    os.kill(bench.engine.process.pid, signal.SIGINT)
    time.sleep(0.1)
    bench.runner.run(bench.engine.health())


def test_an_engine_that_does_not_answer_misses_the_deadline(bench: Bench) -> None:
    os.kill(bench.engine.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineTimeoutError, match="2 s"):
            bench.runner.run(bench.engine.health())
    finally:
        os.kill(bench.engine.process.pid, signal.SIGCONT)
    bench.runner.run(bench.engine.health())


def test_requests_that_make_no_sense_are_refused_and_harm_nobody(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        good = bench.subject.request()
        for bad in (
            msgspec.structs.replace(good, seed=-1),
            msgspec.structs.replace(good, prompt_ids=np.array([1.5], np.float32)),
            msgspec.structs.replace(good, prompt_ids=np.array([10_000], np.int32)),
            msgspec.structs.replace(good, stop_ids=(10_000,)),
            msgspec.structs.replace(good, want_routes=True),
        ):
            with pytest.raises(EngineRefusedError):
                await bench.subject.run(bad)
        score = ScoreRequest(
            request_id="s",
            token_ids=np.array([1, 2], np.int32),
            positions=np.array([7], np.int64),
            temperature=np.ones(1, np.float32),
            kept=None,
            bias=None,
        )
        with pytest.raises(EngineError):
            await bench.engine.score(score)
        await bench.subject.run(good)

    bench.runner.run(run())


def test_256_requests_of_one_moment_all_get_their_own(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        requests = [bench.subject.request(prompt=(1 + index % 7, 5), new=4, seed=index) for index in range(256)]
        together = await asyncio.gather(*map(bench.subject.run, requests))
        for index in (0, 100, 255):
            alone = await bench.subject.run(bench.subject.request(prompt=(1 + index % 7, 5), new=4, seed=index))
            assert together[index].text == alone.text
        assert len({tuple(done.text) for done in together}) > 100

    bench.runner.run(run())


def test_a_request_that_is_refused_fails_alone(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        good = [bench.subject.request(seed=seed) for seed in range(3)]
        bad = msgspec.structs.replace(bench.subject.request(), prompt_ids=np.array([10_000], np.int32))
        outcomes = await asyncio.gather(*map(bench.subject.run, [good[0], bad, *good[1:]]), return_exceptions=True)
        assert [isinstance(outcome, Generated) for outcome in outcomes] == [True, False, True, True]
        assert isinstance(outcomes[1], EngineRefusedError)
        twice = bench.subject.request()
        outcomes = await asyncio.gather(*map(bench.subject.run, [twice, twice]), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["EngineRefusedError", "Generated"]

    bench.runner.run(run())


def test_closing_one_of_many_ends_only_that_one(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        barrier = Barrier(name="never complete", size=3)
        held = [bench.subject.request(barrier=barrier) for _ in range(2)]
        closed, kept, plain = (
            asyncio.create_task(bench.subject.run(request)) for request in [*held, bench.subject.request()]
        )
        await plain
        assert (await bench.engine.status()).queued == 2
        closed.cancel()
        async with asyncio.timeout(5):
            while (await bench.engine.status()).queued != 1:
                await asyncio.sleep(0.01)
        await bench.engine.abort(held[1].request_id)
        assert (await kept).end.finish_reason is FinishReason.ABORTED

    bench.runner.run(run())


def test_diverged_weights_fail_requests_and_a_good_version_heals(bench: Bench) -> None:
    async def run() -> None:
        broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in bench.shelf.weights(0).items()}
        manifest, source = await bench.shelf.publish_weights(2_000_000, broken)
        await bench.engine.stage(manifest, source)
        await bench.engine.verify()
        await bench.engine.commit(manifest.version, InFlightMode.CONTINUE)
        with pytest.raises(EngineError, match="diverged"):
            await bench.subject.run(bench.subject.request())
        await bench.subject.serve()
        await bench.subject.run(bench.subject.request())

    bench.runner.run(run())


def test_a_commit_whose_caller_went_away_does_not_happen(bench: Bench) -> None:
    async def run() -> None:
        before = await bench.subject.serve()
        staged = await bench.subject.prepare()
        running = [await bench.subject.begin(bench.subject.request(new=150, seed=seed)) for seed in range(4)]
        commit = asyncio.create_task(bench.engine.commit(staged.version, InFlightMode.DRAIN))
        await asyncio.sleep(0.03)
        commit.cancel()
        for each in running:
            await each.finish()
        assert (await bench.engine.status()).version == before
        await bench.engine.rollback()

    bench.runner.run(run())


def test_bytes_that_are_not_those_of_the_manifest_are_named(bench: Bench) -> None:
    async def run() -> None:
        await bench.subject.serve()
        manifest, _ = await bench.shelf.publish(3_000_000)
        other = bench.shelf.weights(3_000_000)
        other["model.norm.weight"] = other["model.norm.weight"] + 1
        _, source = await bench.shelf.publish_weights(3_000_001, other)
        await bench.engine.stage(manifest, source)
        report = await bench.engine.verify()
        assert report.digest != manifest.version.digest
        assert report.wrong == ("model.norm.weight",)
        with pytest.raises(EngineRefusedError, match="digest"):
            await bench.engine.commit(manifest.version, InFlightMode.CONTINUE)

    bench.runner.run(run())


def test_bfloat16_from_disk_and_a_killed_engine(folder: Path, tmp_path: Path) -> None:
    """One process: bfloat16 weights by the disk transport; then it is killed in the middle of a generation."""

    async def run() -> None:
        shelf = Shelf(folder, DiskTransport(tmp_path), torch.bfloat16)
        spec = replace(make_spec(folder, tmp_path), dtype=Dtype.BFLOAT16)
        async with launched(spec, shelf) as engine:
            subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size)
            with pytest.raises(EngineRefusedError, match="no version"):
                await subject.run(subject.request())
            await subject.serve()
            done = await subject.run(subject.request())
            assert done.end.dtype == "bfloat16"
            request = ScoreRequest(
                request_id="s",
                token_ids=done.context,
                positions=np.arange(8, len(done.context), dtype=np.int64),
                temperature=np.ones(len(done.text), np.float32),
                kept=None,
                bias=None,
            )
            scored = await engine.score(request)
            np.testing.assert_allclose(scored.logprobs, done.logprobs, atol=0.1)

            running = await asyncio.gather(*(subject.begin(subject.request(new=150)) for _ in range(4)))
            os.kill(engine.process.pid, signal.SIGKILL)
            died_s = time.monotonic()
            for outcome in await asyncio.gather(*(each.finish() for each in running), return_exceptions=True):
                assert isinstance(outcome, EngineDeadError)
                assert "exit code -9" in str(outcome)
            with pytest.raises(EngineDeadError):
                await engine.health()
            assert time.monotonic() - died_s < 10, "it was waited for"
            await engine.close()

    asyncio.run(run())


def test_a_taken_port_is_told_before_any_model_loads(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        spec = replace(make_spec(folder, tmp_path), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="port"):
            asyncio.run(EmbeddedEngine.launch(spec))


def test_an_engine_that_is_not_ready_in_time_is_ended(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineTimeoutError, match="not healthy"):
        asyncio.run(EmbeddedEngine.launch(replace(make_spec(folder, tmp_path), start_timeout_s=0.05)))


def test_a_process_that_ends_while_it_starts_shows_its_last_lines(folder: Path, tmp_path: Path) -> None:
    spec = replace(make_spec(folder, tmp_path), max_running="many")  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="max_running"):
        asyncio.run(EmbeddedEngine.launch(spec))
