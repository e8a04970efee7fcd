"""ATIF documents: what is read is what was written, and what contradicts itself or the schema is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.core.errors import DataError
from fathom.text.atif.document import decode, encode, read_file

TWO_TURNS: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s-0001",
    "agent": {"name": "tiny-agent", "version": "0.1", "model_name": "tiny"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "What is 2+3?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "timestamp": "2026-01-02T03:04:05Z",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2, "b": 3}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "5"}]},
            "metrics": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "cached_tokens": 1,
                "prompt_token_ids": [1, 2, 3],
                "completion_token_ids": [7, 8],
                "logprobs": [-0.5, -0.25],
            },
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "The answer is 5.",
            "reasoning_content": "2 + 3",
            "metrics": {"prompt_token_ids": [1, 2, 3, 7, 8, 9], "completion_token_ids": [4], "logprobs": [-0.1]},
        },
    ],
    "final_metrics": {"total_prompt_tokens": 9, "total_completion_tokens": 3, "total_steps": 3},
}

IMAGE = {"media_type": "image/png", "path": "a.png"}
SOUND = {"media_type": "audio/wav", "path": "a.wav", "duration_sec": 1.5}


def changed(path: str, value: object, tree: dict[str, Any] = TWO_TURNS) -> bytes:
    """The document with one value set, by a path such as `steps.1.metrics.logprobs`; `...` takes it away."""
    tree = copy.deepcopy(tree)
    *parents, last = path.split(".")
    at: Any = tree
    for name in parents:
        at = at[int(name) if isinstance(at, list) else name]
    key: Any = int(last) if isinstance(at, list) else last
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return json.dumps(tree).encode()


def test_what_is_read_is_written_again() -> None:
    document = decode(json.dumps(TWO_TURNS).encode(), "it")
    assert json.loads(encode(document)) == TWO_TURNS
    assert decode(encode(document), "it") == document


@pytest.mark.parametrize("version", [f"ATIF-v1.{minor}" for minor in range(9)])
def test_versions_are_read(version: str) -> None:
    assert decode(changed("schema_version", version), "it").schema_version == version


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema_version", "ATIF-v1.9", "schema_version"),
        ("schema_version", ..., "missing required field `schema_version`"),
        ("steps", [], "length >= 1"),
        ("steps.0.step_id", 2, "count 1, 2, 3"),
        ("steps.2.step_id", 2, "the 3. step has step_id 2"),
        ("steps.0.source", "tool", "source"),
        ("steps.1.surprise", 1, "unknown field `surprise`"),
        ("steps.1.metrics.surprise", 1, "unknown field `surprise`"),
        ("agent.name", ..., "missing required field `name`"),
        ("steps.1.metrics.logprobs", [-0.5], "logprobs has 1 entries for 2 completion tokens"),
        ("steps.1.metrics.completion_token_ids", [7, 8, 9], "completion_tokens says 2"),
        ("steps.1.metrics.prompt_tokens", 4, "prompt_token_ids has 3 ids"),
        ("steps.1.metrics.cached_tokens", 4, "cached_tokens is 4 of 3 prompt tokens"),
        ("steps.1.metrics.prompt_token_ids", [1, 2, -3], "prompt_token_ids"),
        ("steps.1.metrics.prompt_token_ids", [1, 2, 2**31], "prompt_token_ids"),
        ("steps.1.metrics.prompt_token_ids", [1, 2, True], "prompt_token_ids"),
        ("steps.1.metrics.logprobs", [-0.5, "NaN"], "logprobs"),
        ("steps.0.metrics", {"prompt_tokens": 1}, "only steps of the agent have metrics; this step's source is user"),
        ("steps.0.reasoning_content", "hm", "only steps of the agent have reasoning_content"),
        ("steps.0.tool_calls", [], "only steps of the agent have tool_calls"),
        ("steps.1.llm_call_count", 0, "made by no model"),
        ("steps.2.llm_call_count", -1, "llm_call_count"),
        ("steps.1.timestamp", "yesterday", "yesterday"),
        ("steps.1.observation.results.0.source_call_id", "c2", "'c2' names no call of step 2"),
        ("steps.2.observation", {"results": [{"source_call_id": "c1"}]}, "'c1' names no call of step 3"),
        ("steps.1.tool_calls", [TWO_TURNS["steps"][1]["tool_calls"][0]] * 2, "one tool_call_id"),
        ("steps.1.tool_calls.0.arguments", "{}", "arguments"),
        ("steps.0.message", [{"type": "text"}], "missing required field `text`"),
        ("steps.0.message", [{"type": "video", "source": {}}], "video"),
        ("subagent_trajectories", [TWO_TURNS], "needs a trajectory_id of its own"),
        ("subagent_trajectories", [{**TWO_TURNS, "trajectory_id": "x"}] * 2, "needs a trajectory_id of its own"),
        ("final_metrics.total_steps", 4, "notes must say why"),
    ],
)
def test_what_is_wrong_is_refused_by_name(path: str, value: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        decode(changed(path, value), "some.json")
    assert str(caught.value).startswith("some.json is no ATIF document")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps.0.message", [{"type": "text", "text": "see"}, {"type": "image", "source": IMAGE}]),
        ("steps.0.message", [{"type": "audio", "source": SOUND}]),
        ("steps.0.observation", {"results": [{"content": "booted"}]}),
        ("steps.0.extra", {"any": [1, {"thing": None}]}),
        ("steps.2.reasoning_effort", 0.5),
        ("subagent_trajectories", [{**TWO_TURNS, "trajectory_id": "x"}, {**TWO_TURNS, "trajectory_id": "y"}]),
        ("session_id", ...),
    ],
)
def test_what_the_schema_allows_is_read(path: str, value: object) -> None:
    document = decode(changed(path, value), "it")
    assert json.loads(encode(document)) == json.loads(changed(path, value))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"\xff"', b"nonsense", b'{"steps": [1]}', b"[" * 5000])
def test_what_is_no_document_is_refused(text: bytes) -> None:
    with pytest.raises(DataError, match=r"some\.json is no ATIF document"):
        decode(text, "some.json")


def test_deep_nesting_is_refused() -> None:
    one = json.dumps({**TWO_TURNS, "trajectory_id": "x", "subagent_trajectories": ["HERE"]})
    front, back = one.split('"HERE"')
    with pytest.raises(DataError, match="no ATIF document"):
        decode((front * 3000 + back * 3000).encode(), "deep.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_file(tmp_path / "none.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(place=st.integers(0, 2), name=st.sampled_from(["message", "metrics", "tool_calls", "observation"]), value=JSON)
def test_nothing_raises_but_the_named_error(place: int, name: str, value: object) -> None:
    text = changed(f"steps.{place}.{name}", value)
    try:
        document = decode(text, "some.json")
    except DataError:
        return
    assert decode(encode(document), "again") == document


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=5), count=st.integers(0, 5), said=st.none() | st.integers(0, 5))
def test_lengths_are_read_only_if_they_agree(ids: list[int], count: int, said: int | None) -> None:
    metrics = {"completion_token_ids": ids, "logprobs": [-0.5] * count, "completion_tokens": said}
    agree = len(ids) == count and said in (None, count)
    try:
        decode(changed("steps.1.metrics", metrics), "it")
    except DataError:
        assert not agree
    else:
        assert agree
