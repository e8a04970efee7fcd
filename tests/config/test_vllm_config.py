import pytest
from pydantic import ValidationError

from fathom.config.rollout import EngineConfig
from fathom.config.run import RunConfig

URL = {"url": "http://127.0.0.1:8000"}


def test_without_a_section_a_server_is_started() -> None:
    assert EngineConfig.model_validate({"kind": "vllm"}).vllm is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "embedded", "vllm": {"compile": True}}, "remove it"),
        ({"kind": "vllm", "device": "cuda"}, "'cpu' only"),
        ({"kind": "vllm", "vllm": URL, "count": 2}, "count = 1"),
        ({"kind": "vllm", "vllm": URL, "threads": 2}, "remove threads"),
        ({"kind": "vllm", "vllm": URL, "port": 8000, "max_running": 8}, "remove max_running, port"),
        ({"kind": "vllm", "vllm": {**URL, "environment": "x"}}, "remove environment"),
        ({"kind": "vllm", "vllm": {**URL, "compile": True}}, "remove compile"),
        ({"kind": "vllm", "vllm": {"url": "127.0.0.1:8000"}}, "url"),
    ],
)
def test_what_could_not_be_honoured_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(options)


def test_nobody_writes_into_its_memory() -> None:
    run: dict[str, object] = {
        "name": "x",
        "model": {"tiny": "arithmetic"},
        "task": {"kind": "arithmetic"},
        "rollout": {"group_size": 2, "max_in_flight": 2, "max_new_tokens": 4, "max_prompt_tokens": 8},
        "engine": {"kind": "vllm"},
        "trainer": {"steps": 1, "groups_per_step": 1},
    }
    for transport in ("shared", "disk", "broadcast", "delta"):
        RunConfig.model_validate(run | {"sync": {"transport": transport}})
    with pytest.raises(ValidationError, match=r"set sync.transport = 'broadcast'"):
        RunConfig.model_validate(run | {"sync": {"transport": "p2p"}})
