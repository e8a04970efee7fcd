"""What an engine says to a request that it cannot serve as asked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fathom.core.ports.engine import Capabilities, DigestKind, GenerateRequest, ReceivesInto, ScoreRequest
from fathom.core.records.bias import LogitBias, TokenBias
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.core.records.scores import IdLists
from fathom.core.records.trajectory import KeptSets
from fathom.rollout.engines.refusals import why_not_generate, why_not_score

LEAST = Capabilities(
    kept_sets=False,
    routes=False,
    kv_versions=False,
    raw_logprobs=False,
    barriers=False,
    pinned_versions=False,
    double_buffered=False,
    receives_into=ReceivesInto.STAGING,
    in_flight=frozenset({InFlightMode.DRAIN}),
    transports=frozenset(),
    digest=DigestKind.MEMORY,
    max_context_tokens=32,
)
MOST = msgspec.structs.replace(LEAST, logit_bias=True, stop_strings=True, ids_scored=True)
PLAIN = GenerateRequest(
    request_id="r",
    prompt_ids=np.array([1, 2], np.int32),
    sampling=SamplingParams(),
    seed=0,
    max_new_tokens=4,
    stop_ids=(),
    priority=0,
    session_key="s",
    purpose=Purpose.ROLLOUT,
)
SCORE = ScoreRequest(
    request_id="s",
    token_ids=np.array([1, 2, 3], np.int32),
    positions=np.array([1, 2], np.int64),
    temperature=np.ones(2, np.float32),
    kept=None,
    bias=None,
)
IDS = IdLists.of([np.array([1, 2], np.int32), np.array([0], np.int32)])
BIAS = LogitBias(ids=(3, 9), values=(1.0, -1.0))
BEYOND = LogitBias(ids=(3, 10), values=(1.0, -1.0))


def token_bias(bias: LogitBias, count: int = 2) -> TokenBias:
    return TokenBias(biases=(bias,), which=np.zeros(count, np.int32))


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({"sampling": SamplingParams(logit_bias=BIAS)}, "logit_bias"),
        ({"stop_strings": ("\n\n",)}, "stop_strings"),
    ],
)
def test_an_ability_is_refused_by_its_name_where_it_is_not_declared(change: dict[str, Any], lacking: str) -> None:
    request = msgspec.structs.replace(PLAIN, **change)
    assert why_not_generate(PLAIN, LEAST, 10) is None
    assert f"`{lacking}`" in (why_not_generate(request, LEAST, 10) or "")
    assert why_not_generate(request, MOST, 10) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sampling": SamplingParams(logit_bias=BEYOND)}, "ids 3..10 are outside"),
        ({"stop_strings": ("ok", "")}, "empty"),
        ({"stop_strings": ("\ufffd",)}, "no character"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
    ],
)
def test_generations_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    assert says in (why_not_generate(msgspec.structs.replace(PLAIN, **change), MOST, 10) or "")


@pytest.mark.parametrize(
    ("bias", "capabilities", "says"),
    [
        (token_bias(BIAS), LEAST, "`logit_bias`"),
        (token_bias(BEYOND), MOST, "outside its vocabulary"),
        (token_bias(BIAS, 3), MOST, "must be int32 [2]"),
        (TokenBias(biases=(BIAS,), which=np.array([0, 1], np.int32)), MOST, "not there"),
    ],
)
def test_scorings_that_make_no_sense_are_refused(bias: TokenBias, capabilities: Capabilities, says: str) -> None:
    assert why_not_score(SCORE, LEAST, 10) is None
    assert says in (why_not_score(msgspec.structs.replace(SCORE, bias=bias), capabilities, 10) or "")
    assert why_not_score(msgspec.structs.replace(SCORE, bias=token_bias(BIAS)), MOST, 10) is None


@pytest.mark.parametrize(
    ("change", "capabilities", "says"),
    [
        ({"top": 3}, LEAST, "`ids_scored`"),
        ({"others": IDS}, LEAST, "`ids_scored`"),
        ({"others": IdLists.of([np.array([1], np.int32)])}, MOST, "do not fit 2 places"),
        ({"others": IdLists.of([np.array([2, 1], np.int32), np.array([0], np.int32)])}, MOST, "ascending"),
        ({"others": IdLists.of([np.array([2, 10], np.int32), np.array([0], np.int32)])}, MOST, "outside"),
        (
            {
                "others": IDS,
                "kept": KeptSets(offsets=np.array([0, 0, 2], np.int64), ids=np.array([1, 3], np.int32)),
            },
            MOST,
            "position 2 are not in its kept set",
        ),
    ],
)
def test_ids_that_cannot_be_scored_are_refused(change: dict[str, Any], capabilities: Capabilities, says: str) -> None:
    assert says in (why_not_score(msgspec.structs.replace(SCORE, **change), capabilities, 10) or "")
    assert why_not_score(msgspec.structs.replace(SCORE, others=IDS, top=3), MOST, 10) is None


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": np.ones((2, 1), np.float32)},
        {"temperature": np.ones(2, np.float64)},
        {"temperature": np.array([1.0, np.inf], np.float32)},
        {"temperature": np.array([1.0, np.nan], np.float32)},
        {"temperature": np.ones(3, np.float32)},
        {"positions": np.array([[1], [2]], np.int64)},
        {"token_ids": np.array([[1, 2], [3, 4], [5, 6]], np.int32)},
    ],
)
def test_scorings_of_another_shape_are_refused(change: dict[str, Any]) -> None:
    assert why_not_score(msgspec.structs.replace(SCORE, **change), LEAST, 10) is not None
