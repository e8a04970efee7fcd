"""Random schedules of the decode loop, driven turn by turn, against plain forwards of the same model.

What is checked of every token: it was made by the version that was live (or pinned) then, its KV is as old as it says,
and its log-probability is that of a plain forward, or, across a commit that kept the KV, of one sequence decoded alone.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shelf import Shelf, tiny_folder

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest
from fathom.core.ports.engine import Capabilities, DigestKind, GenerateRequest
from fathom.core.records.sampling import FinishReason, InFlightMode, Purpose, SamplingParams
from fathom.model.attention import PackedAttention
from fathom.model.cached_attention import KvCache
from fathom.model.language_model import LanguageModel
from fathom.model.logprobs import token_logprobs
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.messages import RequestFailure
from fathom.rollout.engines.embedded.server.decode.compute import Compute
from fathom.rollout.engines.embedded.server.decode.decoder import Decoder
from fathom.rollout.engines.embedded.server.job import Stream
from fathom.rollout.engines.embedded.server.scheduler import Scheduler
from fathom.rollout.engines.embedded.server.weight_sets import WeightSets
from fathom.sync.transports.disk import DiskTransport

SLOTS, CONTEXT, VERSIONS = 3, 40, 4
PROMPTS = [(3,), (1, 5, 9, 4), (1, 5, 9, 4, 7, 3, 8), tuple(range(1, 30))]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(temperature=1.3, top_k=8, top_p=0.9)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    return Shelf(folder, DiskTransport(folder))


@dataclass
class Loop:
    """A scheduler without process or network; versions appear in it without a transport."""

    shelf: Shelf
    scheduler: Scheduler = field(init=False)
    live: int = 0
    streams: list[tuple[GenerateRequest, Stream]] = field(default_factory=list)
    names: count = field(default_factory=count)

    def __post_init__(self) -> None:
        model = self.shelf.model
        cache = KvCache(model.shape, slots=SLOTS, max_tokens=CONTEXT, dtype=model.dtype, device="cpu")
        capabilities = Capabilities(
            kept_sets=True,
            routes=False,
            kv_versions=True,
            raw_logprobs=True,
            barriers=True,
            pinned_versions=True,
            double_buffered=True,
            in_flight=frozenset(InFlightMode),
            transports=frozenset(),
            digest=DigestKind.MEMORY,
            max_context_tokens=CONTEXT,
        )
        self.scheduler = Scheduler(
            EngineId("e"),
            capabilities,
            Decoder(EngineId("e"), Compute(model, cache), SLOTS, CONTEXT),
            WeightSets(model.weights()),
            lambda chunks: [stream.put_nowait(chunk) for stream, chunk in chunks] and None,
        )
        self.commit(InFlightMode.CONTINUE)

    def version(self, number: int) -> PolicyVersion:
        return PolicyVersion(incarnation=1, number=number, digest=f"d{number}")

    def commit(self, mode: InFlightMode, number: int | None = None) -> None:
        number = number or self.live + 1
        if number > VERSIONS:
            return
        version = self.version(number)
        weights = self.scheduler.take_staging()
        for name, tensor in self.shelf.weights(version.number).items():
            weights.tensors[name].copy_(tensor)
        self.scheduler.received(weights, Manifest(version=version, parent=None, tensors=()))
        self.scheduler.verified(weights, version.digest)
        answer = self.scheduler.commit(version, mode)
        while not answer.done():
            self.scheduler.turn()
        self.live = version.number

    def submit(
        self,
        prompt: int,
        new: int,
        sampling: int,
        stop: bool,
        pinned: bool,
        priority: int,
        pinned_to: PolicyVersion | None = None,
    ) -> None:
        number = next(self.names)
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=np.array(PROMPTS[prompt], np.int32),
            sampling=SAMPLINGS[sampling],
            seed=number,
            max_new_tokens=new,
            stop_ids=(2, 11, 17) if stop else (),
            priority=priority,
            session_key="s",
            purpose=Purpose.EVALUATION if pinned else Purpose.ROLLOUT,
            pinned=pinned_to or (self.version(self.live) if pinned else None),
        )
        stream: Stream = asyncio.Queue()
        self.scheduler.submit([request], stream)
        self.streams.append((request, stream))

    def abort(self, which: int) -> None:
        if self.streams:
            self.scheduler.abort([self.streams[which % len(self.streams)][0].request_id])

    def finish(self) -> list[Generated]:
        while (status := self.scheduler.status()).running or status.queued:
            self.scheduler.turn()
        self.scheduler.turn()
        streams, self.streams = self.streams, []
        return [
            Generated(chunks=[stream.get_nowait() for _ in range(stream.qsize())], request=request)
            for request, stream in streams
        ]


ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 20),
        st.integers(0, len(SAMPLINGS) - 1),
        st.booleans(),
        st.sampled_from([False, False, True]),
        st.integers(0, 2),
    ),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("commit"), st.sampled_from(list(InFlightMode))),
    st.tuples(st.just("abort"), st.integers(0, 5)),
)


def submit(prompt: int, new: int) -> tuple:
    return ("submit", prompt, new, 0, False, False, 0)


TURN = ("turns", 1)


@example(  # every slot holds a prompt; two more of one prompt take the slot of another, which is then asked for
    actions=[submit(1, 1), TURN, submit(2, 1), TURN, submit(3, 1), TURN, submit(3, 9), submit(3, 9), TURN, submit(1, 9)]
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=3, max_size=14))
def test_every_token_is_what_a_plain_forward_makes_it(shelf: Shelf, actions: list[tuple]) -> None:
    with torch.inference_mode():
        loop = Loop(shelf)
        for name, *arguments in actions:
            if name == "turns":
                for _ in range(arguments[0]):
                    loop.scheduler.turn()
            else:
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
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
    pure = np.flatnonzero(policy == kv)
    for number in np.unique(policy[pure]):
        chosen = pure[policy[pure] == number]
        np.testing.assert_allclose(done.logprobs[chosen], forward(shelf, done, int(number))[chosen], atol=1e-5)


def forward(shelf: Shelf, done: Generated, version: int) -> np.ndarray:
    """All tokens by one forward without a cache."""
    model = with_weights(shelf, version)
    ids = torch.from_numpy(done.context.astype(np.int64))
    hidden = model.hidden(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
    return logprobs(done, model.logits(hidden[len(done.request.prompt_ids) - 1 : -1]), range(len(done.text)))


def decoded_alone(shelf: Shelf, done: Generated) -> np.ndarray:
    """Token after token, alone in a cache of its own: prefilled whenever the KV became as new as the weights."""
    model = shelf.model
    cache = KvCache(model.shape, slots=1, max_tokens=CONTEXT, dtype=model.dtype, device="cpu")
    ids = torch.from_numpy(done.context.astype(np.int64))
    found: list[float] = []
    for index, (version, kv) in enumerate(zip(done.policy_version.tolist(), done.kv_version.tolist(), strict=True)):
        end = len(done.request.prompt_ids) + index
        with_weights(shelf, version)
        if index == 0 or kv > done.kv_version[index - 1]:
            start, plan = 0, cache.prefill([0], [0], [end])
        else:
            start, plan = end - 1, cache.decode([0], [end - 1])
        hidden = model.hidden(ids[start:end], torch.arange(start, end), plan)
        found += logprobs(done, model.logits(hidden[-1:]), [index]).tolist()
    return np.array(found, np.float32)


def logprobs(done: Generated, logits: torch.Tensor, positions: Iterable[int]) -> np.ndarray:
    chosen = np.array(list(positions), np.int64)
    kept = done.kept.select(chosen) if done.kept is not None else None
    temperature = torch.full((len(chosen),), done.request.sampling.temperature)
    return token_logprobs(logits, torch.from_numpy(done.token_ids[chosen].astype(np.int64)), temperature, kept).numpy()


def with_weights(shelf: Shelf, version: int) -> LanguageModel:
    shelf.model.use(shelf.weights(version))
    return shelf.model


def test_a_pinned_version_stays_until_another_is_pinned(shelf: Shelf) -> None:
    with torch.inference_mode():
        loop = Loop(shelf)
        loop.submit(1, 2, 0, False, True, 0)
        loop.finish()
        for _ in range(2):
            loop.commit(InFlightMode.CONTINUE)
        first, second = loop.version(1), loop.version(3)
        assert served(loop, first)
        assert served(loop, second)
        loop.commit(InFlightMode.CONTINUE)
        assert served(loop, second)
        loop.submit(1, 2, 0, False, True, 0, pinned_to=first)
        loop.scheduler.turn()
        ((_, stream),) = loop.streams
        refused = stream.get_nowait()
        assert isinstance(refused, RequestFailure)
        assert "does not hold" in refused.failure.reason


def test_kv_is_never_newer_than_its_token_even_when_numbers_go_back(shelf: Shelf) -> None:
    with torch.inference_mode():
        loop = Loop(shelf)
        loop.commit(InFlightMode.CONTINUE, number=3)
        loop.submit(1, 10, 0, False, False, 0)
        loop.scheduler.turn()
        loop.commit(InFlightMode.CONTINUE, number=2)
        (done,) = loop.finish()
    assert set(done.policy_version.tolist()) == {3, 2}
    assert np.array_equal(done.kv_version, done.policy_version)


def served(loop: Loop, pinned: PolicyVersion) -> bool:
    loop.submit(1, 2, 0, False, True, 0, pinned_to=pinned)
    return set(loop.finish()[-1].policy_version.tolist()) == {pinned.number}
