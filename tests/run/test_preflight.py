"""What an engine declares against what the options ask, and the access token."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from small_runs import SCRIPTED, RunProcess, small_config

from fathom.config.families import EngineKind
from fathom.core.errors import ConfigError, MissingDependencyError
from fathom.core.ports.engine import Capabilities, DigestKind, ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.core.wire import frame
from fathom.ledger.events import StepTaken
from fathom.rollout.engines.embedded.messages import StatusCall
from fathom.run.preflight import access_token, check_engine, check_machine

ABLE = Capabilities(
    kept_sets=True,
    routes=True,
    kv_versions=True,
    raw_logprobs=False,
    barriers=True,
    pinned_versions=True,
    double_buffered=True,
    receives_into=ReceivesInto.STAGING,
    in_flight=frozenset(InFlightMode),
    transports=frozenset({"shared", "disk"}),
    digest=DigestKind.MEMORY,
    max_context_tokens=32,
    logit_bias=True,
    stop_strings=True,
)


@pytest.mark.parametrize(
    ("lack", "options", "named"),
    [
        ({"in_flight": frozenset({InFlightMode.DRAIN})}, (), "rollout.in_flight = 'continue'"),
        ({"transports": frozenset({"disk"})}, (), "sync.transport = 'shared'"),
        ({"barriers": False}, ("deterministic=true", "staleness.max_staleness=0"), "deterministic = true"),
        ({"pinned_versions": False}, ("evaluation.tasks=4",), "[evaluation]"),
        ({"kept_sets": False}, ("rollout.sampling.top_k=4",), "rollout.sampling.top_k"),
        ({"logit_bias": False}, ("rollout.sampling.logit_bias.4=-1.5",), "rollout.sampling.logit_bias"),
        ({"stop_strings": False}, ('rollout.stop_strings=["x"]',), "rollout.stop_strings"),
        ({"routes": False}, ("model.tiny=moe", "rollout.record_routes=true"), "rollout.record_routes"),
        ({"kv_versions": False}, (), "staleness.max_kv_staleness"),
        ({"max_context_tokens": 31}, (), "rollout.max_prompt_tokens + rollout.max_new_tokens = 32"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_the_options_name(
    tmp_path: Path, lack: dict[str, object], options: tuple[str, ...], named: str
) -> None:
    config = small_config(tmp_path, *options)
    check_engine(config, ABLE)
    with pytest.raises(ConfigError) as refused:
        check_engine(config, msgspec.structs.replace(ABLE, **lack))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "lack", [{"barriers": False}, {"pinned_versions": False}, {"kept_sets": False}, {"routes": False}]
)
def test_what_is_not_asked_for_may_be_lacking(tmp_path: Path, lack: dict[str, object]) -> None:
    check_engine(small_config(tmp_path), msgspec.structs.replace(ABLE, **lack))


def test_the_token_is_the_named_variables(tmp_path: Path) -> None:
    name, value = "HOME", str(Path.home())
    assert access_token(small_config(tmp_path, f"engine.token_env={name}").engine) == value


def test_without_a_name_the_token_is_fresh(tmp_path: Path) -> None:
    engine = small_config(tmp_path, SCRIPTED).engine
    assert engine.kind is EngineKind.SCRIPTED
    assert access_token(engine) != access_token(engine)


@pytest.mark.slow
def test_the_engine_answers_nobody_without_the_token(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = f"engine.port={port}", "engine.token_env=HOME", "trainer.steps=100000"
    process = RunProcess(small_config(tmp_path, *options))
    process.wait_for(StepTaken)
    url, call = f"http://127.0.0.1:{port}/status", frame(StatusCall())
    given = {"Bearer " + str(Path.home()): 200, "Bearer other": 401, "": 401}
    answers = {header: httpx.post(url, content=call, headers={"authorization": header}) for header in given}
    process.signal(signal.SIGTERM)
    assert process.wait(within_s=10.0) == 143
    assert {header: answer.status_code for header, answer in answers.items()} == given


@pytest.mark.parametrize(("fabric", "module"), [("nixl", "nixl_cu12"), ("mooncake", "mooncake")])
def test_a_fabric_that_is_not_installed_is_named_with_its_extra_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = small_config(tmp_path, "sync.transport=p2p", f"sync.p2p.fabric={fabric}")
    with pytest.raises(MissingDependencyError, match=rf"sync.p2p.fabric = '{fabric}'.*fathom-rl\[{fabric}\]"):
        check_machine(config, weight_bytes=0)


def test_the_fabric_within_a_process_is_no_fabric_for_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sync.p2p.fabric = 'memory' stays within one process"):
        small_config(tmp_path, "sync.transport=p2p", "sync.p2p.fabric=memory")
