"""vLLM with an adapter: the trainer's function after every publication, whatever carried it, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from adapted import FORM, POSITIONS, scored, serve, trained
from shelf import tiny_folder
from vllm_rig import CONTEXT, TOKEN, VOCABULARY, Bench, make_spec

from fathom.config.families import Dtype, TransportKind
from fathom.config.sync import SyncConfig
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError, PayloadError
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.sync.probe import TOLERANCES, Probe
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KINDS = [TransportKind.SHARED, TransportKind.DISK, TransportKind.BROADCAST, TransportKind.DELTA]
NATS = 1e-4


@pytest.fixture(scope="module")
def bench(vllm_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    spec = make_spec(folder, tmp_path_factory.mktemp("run"), vllm_environment)
    with Bench.opened(replace(spec, adapter=FORM, start_timeout_s=580.0)) as bench:
        yield bench


async def probe_of(bench: Bench, weights: dict[str, torch.Tensor]) -> Probe:
    async def score(texts):
        return [trained(bench.shelf.model, weights, text) for text in texts]

    return await Probe.prepare(score, vocab_size=VOCABULARY, longest=CONTEXT, tolerance=TOLERANCES[Dtype.FLOAT32])


@pytest.mark.parametrize("kind", KINDS)
def test_every_publication_is_base_and_adapter(bench: Bench, kind: TransportKind, tmp_path: Path) -> None:
    async def run() -> None:
        config = SyncConfig(transport=kind)
        publisher = Publisher([bench.engine], TRANSPORTS[kind](tmp_path, config), config)
        last = np.zeros(len(POSITIONS))
        for number in (1, 2, 3):
            weights = bench.shelf.weights(10 * KINDS.index(kind) + number)
            probe = await probe_of(bench, weights)
            publication = await publisher.publish(
                weights,
                number,
                2 + KINDS.index(kind),
                InFlightMode.DRAIN,
                probe=probe,
                adapter=bench.shelf.adapter,
            )
            assert publication.size_bytes == sum(tensor.nbytes for tensor in weights.values())
            found = await scored(bench.engine, f"{kind}/{number}")
            assert np.abs(found - trained(bench.shelf.model, weights)).max() < NATS
            assert np.abs(found - last).max() > 1e-2
            last = found
        await publisher.close()

    bench.runner.run(run())


def test_generations_are_the_adapters(bench: Bench) -> None:
    async def run() -> None:
        version = await bench.subject.serve(InFlightMode.DRAIN)
        generated = await bench.subject.run(bench.subject.request(new=24))
        said = trained(bench.shelf.model, bench.shelf.weights(version.number), generated.context)
        sampled = said[-len(generated.logprobs) :]
        assert np.abs(sampled - generated.logprobs).max() < NATS

    bench.runner.run(run())


def test_load_evict_load_again_changes_nothing(bench: Bench) -> None:
    """vLLM reads a dropped adapter again from where it was told that it lies."""

    async def run() -> None:
        await serve(bench.engine, *await bench.shelf.publish(201))
        first = await scored(bench.engine, "evict/0")
        for turn in (1, 2):
            call = {"method": "remove_lora", "kwargs": {"lora_id": 1}}
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
                answer = await http.post(f"{bench.engine.server.url}/collective_rpc", json=call)
            assert answer.json()["results"] == ["True"]
            assert np.array_equal(await scored(bench.engine, f"evict/{turn}"), first)
        assert np.abs(first - trained(bench.shelf.model, bench.shelf.weights(201))).max() < NATS

    bench.runner.run(run())


def test_what_is_not_for_this_base_is_refused(bench: Bench) -> None:
    identity = bench.shelf.adapter
    assert identity is not None

    async def run() -> None:
        manifest, source = await bench.shelf.publish(301)
        for adapter, says in (
            (AdapterIdentity(form=identity.form, base="0" * 64), "another base"),
            (None, "the whole model"),
        ):
            wrong = type(manifest)(manifest.version, manifest.parent, manifest.tensors, adapter=adapter)
            with pytest.raises(PayloadError, match=says):
                await bench.engine.stage(wrong, source)

    bench.runner.run(run())


def test_a_server_started_elsewhere_has_no_adapter(bench: Bench, tmp_path: Path) -> None:
    spec = make_spec(bench.folder, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"lora\.publish = 'merged'"):
        bench.runner.run(VllmEngine.launch(replace(spec, adapter=FORM, url="http://127.0.0.1:1")))
