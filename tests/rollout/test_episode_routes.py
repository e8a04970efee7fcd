"""Expert routes on their way from an engine's chunks to a row."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.core.errors import RecordError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.core.records.trajectory import TokenBranch
from fathom.rollout.episode import assemble
from fathom.rollout.sampled import prompt_hash

PROMPT = np.array([5, 6, 7, 8], np.int32)
LAYERS, PER_TOKEN = 3, 2


def routes(count: int, start: int = 0, dtype: type = np.uint8, layers: int = LAYERS) -> np.ndarray:
    """Of the inputs from `start` on; each can be told from all others."""
    inputs = np.arange(start, start + count)[:, None, None]
    return (inputs * 8 + np.arange(layers)[:, None] * 2 + np.arange(PER_TOKEN)).astype(dtype)


def chunk(
    versions: list[int], carried: np.ndarray | None, *, kv: list[int] | None = None, last: bool = False
) -> GenerateChunk:
    end = GenerateEnd(
        finish_reason=FinishReason.STOP,
        engine=EngineId("engine-0"),
        dtype="bfloat16",
        kernels="sdpa",
        prompt_hash=prompt_hash(PROMPT),
        cached_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        queue_s=0.0,
        generate_s=1.0,
    )
    count = len(versions)
    return GenerateChunk(
        request_id="r",
        token_ids=np.full(count, 9, np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        policy_version=np.array(versions, np.int32),
        kv_version=np.array(versions if kv is None else kv, np.int32),
        versions=tuple(PolicyVersion(incarnation=1, number=n, digest=f"{n}") for n in {*versions, *(kv or versions)}),
        kept=None,
        raw_logprobs=None,
        routes=carried,
        end=end if last else None,
    )


def branch_of(chunks: list[GenerateChunk], *, wanted: bool = True) -> TokenBranch:
    return assemble(PROMPT, chunks, SamplingParams(), routes=wanted).branches[0]


def test_routes_are_put_together_once_each() -> None:
    branch = branch_of([chunk([0, 0], routes(5)), chunk([0], routes(1, 5)), chunk([], None, last=True)])
    assert branch.routes is not None
    assert np.array_equal(branch.routes, routes(6))
    assert len(branch.routes) == len(branch.token_ids) - 1


def test_two_bytes_stay_two_bytes() -> None:
    branch = branch_of([chunk([0], routes(4, dtype=np.uint16), last=True)])
    assert branch.routes is not None
    assert branch.routes.dtype == np.uint16


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk([0, 0], None, last=True)], "no expert routes"),
        ([chunk([0, 0], routes(4), last=True)], "of 4 inputs of 5: coverage must be complete"),
        ([chunk([0, 0], routes(5)), chunk([0], None, last=True)], "of 5 inputs of 6"),
        ([chunk([0, 0], routes(5)), chunk([0], routes(6), last=True)], "of 11 inputs of 6"),
        ([chunk([0, 0], routes(5)), chunk([0], routes(1, 5, np.uint16), last=True)], "of several shapes"),
        ([chunk([0, 0], routes(5)), chunk([0], routes(1, 5, layers=2), last=True)], "of several shapes"),
        ([chunk([0, 0], routes(5)[:, 0], last=True)], "of several shapes"),
    ],
)
def test_routes_that_do_not_cover_every_input_once_are_refused(chunks: list[GenerateChunk], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        branch_of(chunks)


def test_nothing_sampled_needs_no_routes() -> None:
    assert branch_of([chunk([], None, last=True)]).routes is None


def test_routes_nobody_asked_for_are_not_kept() -> None:
    assert branch_of([chunk([0, 0], routes(5), last=True)], wanted=False).routes is None


@pytest.mark.parametrize(
    ("versions", "kv", "mixed"),
    [
        ([0, 0, 0], [0, 0, 0], [False, False, False]),
        ([0, 1, 1], [0, 0, 0], [False, True, True]),  # the context was kept
        ([0, 1, 1], [0, 1, 1], [False, True, True]),  # the context was computed again, its routes were not recorded
        ([1, 1, 2], [0, 0, 2], [True, True, True]),  # an update came between prompt and first token
    ],
)
def test_tokens_after_routes_of_an_older_version_are_mixed(
    versions: list[int], kv: list[int], mixed: list[bool]
) -> None:
    branch = branch_of([chunk(versions, routes(6), kv=kv, last=True)])
    assert branch.mixed_routes.tolist() == mixed
