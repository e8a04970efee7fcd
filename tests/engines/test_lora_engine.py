"""An embedded engine that computes with an adapter: the trainer's function after every publication, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted import FORM, POSITIONS, scored, serve, trained
from shelf import Shelf, tiny_folder

from fathom.config.families import Dtype, TransportKind
from fathom.config.lora import LoraConfig
from fathom.config.sync import SyncConfig
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import EngineRefusedError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.records.sampling import InFlightMode
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.conformance import Case, Subject
from fathom.rollout.engines.conformance.versions import VERSION_CASES
from fathom.rollout.engines.embedded.client import EmbeddedEngine
from fathom.rollout.engines.embedded.process import EmbeddedSpec
from fathom.sync.digest import digest
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS
from fathom.sync.transports.shared import SharedTransport
from fathom.text.characters import save_character_tokenizer

MOVING = [TransportKind.SHARED, TransportKind.DISK, TransportKind.BROADCAST, TransportKind.DELTA]


@dataclass
class Bench:
    runner: asyncio.Runner
    engine: EmbeddedEngine
    shelf: Shelf
    subject: Subject


def launched(folder: Path, run: Path, dtype: Dtype, aligned: bool) -> Iterator[Bench]:
    transport = SharedTransport(run)
    shelf = Shelf(folder, transport, getattr(torch, dtype.value), aligned, FORM)
    spec = EmbeddedSpec(
        engine=EngineId("e0"),
        model_folder=folder,
        log_path=run / "engine.log",
        max_context_tokens=192,
        max_running=16,
        dtype=dtype,
        adapter=FORM,
        aligned=aligned,
    )
    with asyncio.Runner() as runner:
        engine = runner.run(EmbeddedEngine.launch(spec))
        subject = Subject(engine, shelf.publish, shelf.model.shape.vocab_size, shelf.tolerance)
        yield Bench(runner, engine, shelf, subject)
        runner.run(engine.close())
    transport.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from launched(
        tiny_folder(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("run"), Dtype.FLOAT32, True
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    save_character_tokenizer(folder)
    make_tiny("moe", 0, folder)
    yield from launched(folder, tmp_path_factory.mktemp("run"), Dtype.BFLOAT16, False)


async def published(bench: Bench, number: int) -> np.ndarray:
    """Version `number` as the engine's port takes it; what the engine then says of the tokens."""
    await serve(bench.engine, *await bench.shelf.publish(number))
    return await scored(bench.engine, f"{number}")


@pytest.mark.parametrize("case", VERSION_CASES, ids=lambda case: case.__name__)
def test_conformance(bench: Bench, case: Case) -> None:
    assert bench.engine.capabilities.adapters
    bench.runner.run(case(bench.subject))


@pytest.mark.parametrize("transport", MOVING)
def test_every_publication_is_base_and_adapter(bench: Bench, transport: TransportKind, tmp_path: Path) -> None:
    """In aligned mode to the bit, whatever carries it; the bytes are the adapter's."""

    async def run() -> None:
        config = SyncConfig(transport=transport)
        publisher = Publisher([bench.engine], TRANSPORTS[transport](tmp_path, config), config)
        base = digest(bench.shelf.model.base_weights())
        last = np.zeros(len(POSITIONS))
        incarnation = 2 + MOVING.index(transport)
        for number in (1, 2, 3):
            weights = bench.shelf.weights(number)
            publication = await publisher.publish(
                weights, number, incarnation, InFlightMode.DRAIN, adapter=bench.shelf.adapter
            )
            assert publication.size_bytes == sum(tensor.nbytes for tensor in weights.values())
            found = await scored(bench.engine, f"{transport}/{number}")
            assert np.array_equal(found, trained(bench.shelf.model, weights))
            assert np.abs(found - last).max() > 1e-3
            last = found
        assert digest(bench.shelf.model.base_weights()) == base
        await publisher.close()

    bench.runner.run(run())


@pytest.mark.parametrize("which", ["bench", "experts"])
def test_load_evict_load_again_changes_nothing(which: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(which)

    async def run() -> None:
        first = await published(bench, 101)
        wanted = trained(bench.shelf.model, bench.shelf.weights(101))
        assert np.abs(first - wanted).max() <= bench.shelf.tolerance
        assert np.abs(await published(bench, 102) - first).max() > 1e-3
        assert np.array_equal(await published(bench, 101), first)

    bench.runner.run(run())


def other(identity: AdapterIdentity, **form: object) -> AdapterIdentity:
    changed = {name: form.get(name, getattr(identity.form, name)) for name in identity.form.__struct_fields__}
    return AdapterIdentity(form=type(identity.form)(**changed), base=identity.base)


def test_what_is_not_for_this_base_and_form_is_refused(bench: Bench) -> None:
    identity = bench.shelf.adapter
    assert identity is not None
    elsewhere = AdapterIdentity(form=identity.form, base="0" * 64)

    async def run() -> None:
        before = await published(bench, 201)
        manifest, source = await bench.shelf.publish(202)
        for adapter, says in (
            (elsewhere, "another base"),
            (other(identity, alpha=24.0), "alpha 24.0 instead of 12.0"),
            (other(identity, rslora=True), "rslora"),
            (None, "the whole model"),
        ):
            wrong = type(manifest)(manifest.version, manifest.parent, manifest.tensors, adapter=adapter)
            with pytest.raises((EngineRefusedError, PayloadError), match=says):
                await bench.engine.stage(wrong, source)
        assert np.array_equal(await scored(bench.engine, "after"), before)

    bench.runner.run(run())


def test_a_form_that_does_not_fit_the_model_ends_the_start(bench: Bench, tmp_path: Path) -> None:
    assert bench.engine.process is not None
    form = LoraConfig(target_modules=("nothing",)).form("tests")
    spec = replace(bench.engine.process.spec, adapter=form, log_path=tmp_path / "log")
    with pytest.raises(Exception, match="names nothing"):
        bench.runner.run(EmbeddedEngine.launch(spec))
