"""Random schedules of the decode loop on a real model, driven turn by turn, against plain forwards of the same model.

What is checked of every token: it was made by the version that was live (or pinned) then, and it is what the plain loop
draws; across a commit that kept the KV, its log-probability is that of one sequence decoded alone. In aligned mode to
the bit.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shelf import Shelf, tiny_folder
from turns import Turns

from fathom.core.ids import PolicyVersion
from fathom.core.records.sampling import FinishReason, InFlightMode, SamplingParams
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import PAGE_TOKENS, KvPages
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.messages import RequestFailure
from fathom.rollout.engines.embedded.server.decode.model_forward import ModelForward
from fathom.rollout.engines.embedded.server.decode.plain_loop import PlainLoop
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet, WeightSets
from fathom.sync.transports.disk import DiskTransport

CONTEXT, PAGES = 70, 5
PROMPTS = [(3,), (1, 5, 9, 4), (1, 5, 9, 4, 7, 3, 8), tuple(range(1, 30)), tuple(range(1, 50))]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(temperature=1.3, top_k=8, top_p=0.9)]


@pytest.fixture(scope="module", params=["tiled", "aligned"])
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    return Shelf(folder, DiskTransport(folder), aligned=request.param == "aligned")


def turns(shelf: Shelf) -> Turns:
    """Two and a half of the longest sequences fit."""
    model = shelf.model
    kv = KvPages(model.shape, pages=PAGES, dtype=model.dtype, device="cpu")

    def fill(weights: WeightSet, number: int) -> None:
        for name, tensor in shelf.weights(number).items():
            weights.tensors[name].copy_(tensor)

    return Turns(
        forward=ModelForward(model, kv),
        weights=WeightSets(model.weights()),
        fill=fill,
        context=CONTEXT,
        pages=PAGES,
        page_tokens=PAGE_TOKENS,
    )


ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from(PROMPTS),
        st.integers(1, 30),
        st.sampled_from(SAMPLINGS),
        st.sampled_from([(), (2, 11, 17)]),
        st.sampled_from([False, False, True]),
        st.integers(0, 2),
    ),
    st.tuples(st.just("turn"), st.integers(1, 6)),
    st.tuples(st.just("commit"), st.sampled_from(list(InFlightMode))),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


def submit(prompt: int, new: int) -> tuple:
    return ("submit", PROMPTS[prompt], new, SAMPLINGS[0], (), False, 0)


TURN, COMMIT = ("turn", 1), ("commit", InFlightMode.CONTINUE)


@example([submit(4, 20), submit(4, 20), submit(3, 30), ("turn", 9), COMMIT])  # too few pages
@example([submit(4, 3), TURN, COMMIT, ("turn", 9), submit(4, 3)])  # the prompt's KV is of two versions
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, min_size=3, max_size=14))
def test_every_token_is_what_a_plain_loop_makes_it(shelf: Shelf, actions: list[tuple]) -> None:
    with torch.inference_mode():
        loop = turns(shelf)
        for name, *arguments in actions:
            if name == "submit":
                prompt, new, sampling, stop, pinned, priority = arguments
                version = loop.version(loop.live) if pinned else None
                loop.submit(prompt, new, sampling=sampling, stop=stop, pinned=version, priority=priority)
            elif name != "commit" or loop.live < 4:
                getattr(loop, name)(*arguments)
        for done in loop.finish():
            check(shelf, done)


def check(shelf: Shelf, done: Generated) -> None:
    policy, kv = done.policy_version, done.kv_version
    if done.request.pinned is not None:
        assert set(policy.tolist()) | set(kv.tolist()) <= {done.request.pinned.number}
    if done.end.finish_reason is FinishReason.CONTEXT:
        assert len(done.context) == CONTEXT
    expected = decoded_alone(shelf, done)
    for index in np.flatnonzero(policy == kv).tolist():
        expected[index] = by_plain_loop(shelf, done, index, logits_by_one_forward)
    known = ~np.isnan(expected)
    assert known[policy == kv].all(), "a token that the plain loop would not draw"
    np.testing.assert_allclose(done.logprobs[known], expected[known], rtol=0, atol=shelf.tolerance)


def by_plain_loop(
    shelf: Shelf, done: Generated, index: int, logits: Callable[[LanguageModel, np.ndarray], torch.Tensor]
) -> float:
    model = with_weights(shelf, int(done.policy_version[index]))
    context, slack = done.context[: len(done.request.prompt_ids) + index], shelf.tolerance
    return PlainLoop(lambda context: logits(model, context)).logprob(done.request, context, done.text[index], slack)


def logits_by_one_forward(model: LanguageModel, context: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(context.astype(np.int64))
    return model.logits(model.hidden(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))[-1:])


def decoded_alone(shelf: Shelf, done: Generated) -> np.ndarray:
    """Token after token, alone in pages of its own: computed anew whenever the KV became as new as the weights.

    NaN where a context was computed in pieces by several versions.
    """
    model = shelf.model
    kv = KvPages(model.shape, pages=3, dtype=model.dtype, device="cpu")
    found = np.full(len(done.text), np.nan, np.float32)
    computed = 0

    def logits(model: LanguageModel, context: np.ndarray) -> torch.Tensor:
        spans = np.array([computed]), np.array([len(context) - computed])
        ids = torch.from_numpy(context[computed:].astype(np.int64))
        plan = kv.plan(np.array([[0, 1, 2]]), *spans)
        return model.logits(model.hidden(ids, torch.arange(computed, len(context)), plan)[-1:])

    for index, (version, oldest) in enumerate(zip(done.policy_version.tolist(), done.kv_version.tolist(), strict=True)):
        if index == 0 or oldest > done.kv_version[index - 1]:
            computed = 0
        if computed or version == oldest:
            found[index] = by_plain_loop(shelf, done, index, logits)
            computed = len(done.request.prompt_ids) + index
    return found


def with_weights(shelf: Shelf, version: int) -> LanguageModel:
    shelf.model.use(shelf.weights(version))
    return shelf.model


def test_the_plain_loop_alone_generates_the_same(shelf: Shelf) -> None:
    with torch.inference_mode():
        loop = turns(shelf)
        for sampling in SAMPLINGS:
            loop.submit(PROMPTS[3], 20, sampling=sampling)
        for done in loop.finish():
            model = with_weights(shelf, 1)
            ids, logprobs = PlainLoop(lambda context, model=model: logits_by_one_forward(model, context)).generate(
                done.request, 20
            )
            assert ids.tolist() == done.text
            np.testing.assert_allclose(logprobs, done.logprobs, rtol=0, atol=shelf.tolerance)


def test_a_pinned_version_stays_until_another_is_pinned(shelf: Shelf) -> None:
    with torch.inference_mode():
        loop = turns(shelf)
        assert served(loop, loop.version(1))
        for _ in range(2):
            loop.commit(InFlightMode.CONTINUE)
        first, second = loop.version(1), loop.version(3)
        assert served(loop, first)
        assert served(loop, second)
        loop.commit(InFlightMode.CONTINUE)
        assert served(loop, second)
        stream = loop.submit(PROMPTS[1], 2, pinned=first)
        loop.turn()
        refused = stream.get_nowait()
        assert isinstance(refused, RequestFailure)
        assert "does not hold" in refused.failure.reason


def test_kv_is_never_newer_than_its_token_even_when_numbers_go_back(shelf: Shelf) -> None:
    with torch.inference_mode():
        loop = turns(shelf)
        loop.commit(InFlightMode.CONTINUE, number=3)
        loop.submit(PROMPTS[1], 10)
        loop.turn()
        loop.commit(InFlightMode.CONTINUE, number=2)
        (done,) = loop.finish()
    assert set(done.policy_version.tolist()) == {3, 2}
    assert np.array_equal(done.kv_version, done.policy_version)


def served(loop: Turns, pinned: PolicyVersion) -> bool:
    loop.submit(PROMPTS[1], 2, pinned=pinned)
    return set(loop.finish()[-1].policy_version.tolist()) == {pinned.number}
