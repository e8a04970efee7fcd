"""The vLLM adapter against a real server. Skipped where vLLM is not installed; `make test-vllm` installs it."""

import dataclasses
from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from vllm_rig import TOLERANCE, Bench, make_spec

from fathom.config.families import Dtype
from fathom.config.run import RunConfig
from fathom.core.errors import ConfigError, EngineRefusedError
from fathom.core.records.sampling import SamplingParams
from fathom.evidence.contracts.audit import audit
from fathom.ledger.events import Published
from fathom.ledger.reader import LedgerReader
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.vllm.client import VllmEngine
from fathom.run.history.folder import RunFolder
from fathom.run.run import Run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case, vllm_bench: Bench) -> None:
    vllm_bench.runner.run(case(vllm_bench.subject))


def test_every_call_needs_the_token(vllm_bench: Bench) -> None:
    for path in ("/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"):
        assert httpx.post(vllm_bench.engine.server.url + path).status_code == 401


def test_what_vllm_would_do_otherwise_is_refused(vllm_bench: Bench) -> None:
    async def run() -> None:
        await vllm_bench.subject.serve()
        good = vllm_bench.subject.request()
        for bad, reason in (
            (replace(good, sampling=SamplingParams(temperature=0.001)), "temperatures"),
            (replace(good, sampling=SamplingParams(temperature=2.5)), "temperatures"),
            (replace(good, prompt_ids=np.array([10_000], np.int32)), "vocabulary"),
            (replace(good, want_raw_logprobs=True), "raw_logprobs"),
        ):
            with pytest.raises(EngineRefusedError, match=reason):
                await vllm_bench.subject.run(bad)
        await vllm_bench.subject.run(good)

    vllm_bench.runner.run(run())


def test_attached_by_url_and_left_running(vllm_bench: Bench, tmp_path: Path, vllm_environment: Path) -> None:
    async def run() -> None:
        spec = make_spec(vllm_bench.folder, tmp_path, vllm_environment)
        spec = dataclasses.replace(spec, url=vllm_bench.engine.server.url)
        engine = await VllmEngine.launch(spec)
        subject = Subject(engine, vllm_bench.shelf.publish, vllm_bench.subject.vocab_size, TOLERANCE)
        with pytest.raises(EngineRefusedError, match="no version"):
            await subject.run(subject.request())
        await engine.close()
        for wrong in (dataclasses.replace(spec, token="wrong"), dataclasses.replace(spec, dtype=Dtype.BFLOAT16)):
            with pytest.raises(ConfigError):
                await VllmEngine.launch(wrong)
        await vllm_bench.subject.serve()

    vllm_bench.runner.run(run())


def test_a_short_run_publishes_every_step(vllm_environment: Path, tmp_path: Path) -> None:
    config = {
        "name": "vllm",
        "runs_dir": str(tmp_path),
        "model": {"tiny": "arithmetic"},
        "task": {
            "kind": "arithmetic",
            "options": {"operators": ["+"], "max_operand": 9, "num_train": 64, "num_eval": 16},
        },
        "rollout": {"group_size": 4, "max_in_flight": 32, "max_new_tokens": 6, "max_prompt_tokens": 16},
        "engine": {"kind": "vllm", "max_running": 32, "vllm": {"environment": str(vllm_environment)}},
        "sync": {"transport": "broadcast"},
        # An untrained model earns nothing: decay moves its weights all the same.
        "trainer": {"steps": 4, "groups_per_step": 4, "optimizer": {"lr": 1e-3, "weight_decay": 1.0}},
    }
    run = Run(RunConfig.model_validate(config))
    result = run.start()
    assert result.reason == "steps"
    with LedgerReader(RunFolder(result.folder).ledger) as reader:
        published = [each.event for each in reader.events(Published)]
        report = audit(reader)
    assert [event.version.number for event in published] == list(range(5))
    assert len({event.version.digest for event in published}) == 5
    assert all(event.fenced == () for event in published)
    gaps = [event.gap for event in published if event.gap is not None]
    assert gaps
    assert report.passed, [check for check in report.checks if not check.passed]
