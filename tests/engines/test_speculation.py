"""Speculation changes how many tokens a step makes, and nothing else: same tokens, log-probabilities, kept sets."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shelf import Shelf, tiny_folder
from test_scheduling import ACTIONS, BASE, SAMPLINGS, check, submit
from turns import Turns

from fathom.core.errors import ConfigError
from fathom.core.ports.engine import Barrier, GenerateRequest
from fathom.core.records.bias import LogitBias
from fathom.core.records.sampling import FinishReason, InFlightMode, SamplingParams
from fathom.model.aligned import align
from fathom.model.language_model import LanguageModel
from fathom.model.paged_attention import PAGE_TOKENS, KvPages
from fathom.model.tiny import make_tiny
from fathom.rollout.engines.conformance.subject import Generated
from fathom.rollout.engines.embedded.server.decode.draft.model_proposer import ModelProposer
from fathom.rollout.engines.embedded.server.decode.draft.ngram_proposer import NgramProposer
from fathom.rollout.engines.embedded.server.decode.draft.proposer import Proposer
from fathom.rollout.engines.embedded.server.decode.model_forward import ModelForward
from fathom.rollout.engines.embedded.server.decode.sampler import draw
from fathom.rollout.engines.embedded.server.decode.scripted_forward import ScriptedForward, scripted_logits
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet, WeightSets
from fathom.rollout.engines.uniforms import uniforms
from fathom.sync.transports.disk import DiskTransport
from fathom.text.characters import save_character_tokenizer


@dataclass
class Seer:
    """Guesses what the scripted forward of version 1 samples; every so often it errs."""

    errs_every: int = 5
    asked: int = 0
    requests: dict[int, GenerateRequest] = field(default_factory=dict)

    def open(self, slot: int, request: GenerateRequest) -> None:
        self.requests[slot] = request

    def propose(self, slots: Sequence[int], contexts: Sequence[np.ndarray], most: Sequence[int]) -> list[np.ndarray]:
        return [self.guess(self.requests[slot], *each) for slot, *each in zip(slots, contexts, most, strict=True)]

    def guess(self, request: GenerateRequest, context: np.ndarray, most: int) -> np.ndarray:
        whole = context
        for _ in range(most):
            logits = torch.from_numpy(scripted_logits(whole, 1, 1)).unsqueeze(0)
            uniform = uniforms(np.array([request.seed], np.uint64), np.array([len(whole)]))
            token = int(draw(logits, [request.sampling], uniform, raw=False).token_ids[0])
            self.asked += 1
            wrong = self.errs_every > 0 and self.asked % self.errs_every == 0
            whole = np.append(whole, np.int32((token + wrong) % 64)).astype(np.int32)
        return whole[len(context) :]


def turns(pages: int, proposer: Proposer | None, *, page_tokens: int = 4, step: int = 16) -> Turns:
    forward = ScriptedForward(pages=pages, page_tokens=page_tokens)
    return Turns(
        forward=forward, slots=4, context=40, step=step, pages=pages, page_tokens=page_tokens, proposer=proposer
    )


def play(loop: Turns, actions: list[tuple]) -> list[Generated]:
    for name, *arguments in actions:
        if name == "submit":
            common, own, new, sampling, stop, priority, pinned, routes = arguments
            prompt = BASE[:common] + (30 + own,) * own
            version = loop.version(loop.live) if pinned else None
            loop.submit(prompt, new, sampling=sampling, stop=stop, priority=priority, pinned=version, routes=routes)
        else:
            getattr(loop, name)(*arguments)
    return loop.finish()


def same(left: Generated, right: Generated) -> None:
    assert left.text == right.text
    assert left.logprobs.tobytes() == right.logprobs.tobytes()
    assert left.end.finish_reason is right.end.finish_reason
    assert np.array_equal(left.policy_version, right.policy_version)
    assert np.array_equal(left.kv_version, right.kv_version)
    assert (left.routes is None) == (right.routes is None)
    if left.routes is not None:
        assert np.array_equal(left.routes, right.routes)


PROPOSERS: list[Callable[[], Proposer]] = [lambda: Seer(0), Seer, lambda: Seer(1), NgramProposer]


@example(10, PROPOSERS[0], [submit(12, 24), submit(12, 24), submit(12, 24), submit(12, 24), ("turn", 2)])
@settings(max_examples=100, deadline=None)
@given(st.integers(10, 24), st.sampled_from(PROPOSERS), st.lists(ACTIONS, min_size=3, max_size=24))
def test_random_schedules(pages: int, make: Callable[[], Proposer], actions: list[tuple]) -> None:
    """Every token is the plain loop's whatever happens; pages are counted after every turn, and nothing starves."""
    for done in play(turns(pages, make()), actions):
        check(done)
        assert 0 <= done.end.accepted_tokens <= min(done.end.drafted_tokens, max(0, len(done.text) - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(10, 24), st.sampled_from(PROPOSERS), st.lists(ACTIONS, min_size=3, max_size=16))
def test_streams_are_those_without_speculation(pages: int, make: Callable[[], Proposer], actions: list[tuple]) -> None:
    """Where no commit or abort comes in between, for these find another token of each sequence."""
    quiet = [action for action in actions if action[0] in ("submit", "turn")]
    with_it, without = play(turns(pages, make()), quiet), play(turns(pages, None), quiet)
    for left, right in zip(with_it, without, strict=True):
        same(left, right)
        assert right.end.drafted_tokens == 0


def test_right_guesses_save_forwards_and_are_counted() -> None:
    seer = Seer(0)
    loop = turns(40, seer)
    loop.submit(BASE[:4], 31)
    loop.turn()
    steps = 1
    while loop.decoder.jobs:
        loop.turn()
        steps += 1
    (done,) = loop.finish()
    # One token after the prompt, then five in each step.
    assert steps == 1 + 6
    assert (done.end.drafted_tokens, done.end.accepted_tokens) == (24, 24)
    assert len(done.text) == 31
    check(done)


def test_every_wrong_guess_is_counted_and_a_hopeless_sequence_rests() -> None:
    loop = Turns(
        forward=ScriptedForward(pages=200, page_tokens=4),
        context=400,
        step=16,
        pages=200,
        page_tokens=4,
        proposer=Seer(1),
    )
    loop.submit(BASE[:4], 300)
    (done,) = loop.finish()
    assert done.end.accepted_tokens == 0
    assert 0 < done.end.drafted_tokens < 60
    check(done)


def test_a_stop_inside_accepted_guesses_ends_there() -> None:
    loop = turns(40, None)
    loop.submit(BASE[:4], 31)
    (whole,) = loop.finish()
    stop = whole.text[12]
    loop = turns(40, Seer(0))
    loop.submit(BASE[:4], 31, stop=(stop,), seed=0)
    (done,) = loop.finish()
    assert done.text == whole.text[: whole.text.index(stop) + 1]
    assert done.end.finish_reason is FinishReason.STOP
    loop.submit(tuple(done.context.tolist()), 3)
    (later,) = loop.finish()
    check(later)


def test_a_large_step_has_no_guesses() -> None:
    loop = Turns(
        forward=ScriptedForward(pages=400, page_tokens=4),
        slots=40,
        context=40,
        step=160,
        pages=400,
        page_tokens=4,
        proposer=Seer(0),
    )
    for index in range(40):
        loop.submit((index, 1, 2), 8)
    assert all(done.end.drafted_tokens == 0 for done in loop.finish())


def test_guesses_push_nobody_out() -> None:
    """Two sequences that just fit: with guesses, neither is computed twice."""
    counts = []
    for proposer in (None, Seer(0)):
        loop = turns(20, proposer)
        loop.submit(BASE[:4], 36)
        loop.submit(BASE[1:5], 36)
        for done in loop.finish():
            check(done)
        assert isinstance(loop.forward, ScriptedForward)
        counts.append(loop.forward.computed)
    assert counts[0] == counts[1]


def test_a_barrier_repeats_to_the_bit() -> None:
    def run(loop: Turns, name: str, order: list[int]) -> list[Generated]:
        barrier = Barrier(name=name, size=6)
        for member in order:
            loop.submit(
                BASE[: 9 + member % 2], 20, barrier=barrier, name=f"{name}/{member}", seed=member, priority=member % 3
            )
        return sorted(loop.finish(), key=lambda done: done.request.request_id)

    loop = turns(12, NgramProposer())
    one = run(loop, "a", [0, 1, 2, 3, 4, 5])
    loop.submit(BASE[:30], 9)
    loop.finish()
    other = run(loop, "b", [4, 1, 5, 0, 3, 2])
    for left, right in zip(one, other, strict=True):
        same(left, right)
        assert left.end.drafted_tokens == right.end.drafted_tokens


def test_ngrams_find_the_latest_place_and_repeat_what_ends_there() -> None:
    proposer = NgramProposer()
    request = turns(10, None)
    request.submit((1,), 1)
    proposer.open(0, request.streams[0][0])

    def guess(*tokens: int, most: int = 4) -> list[int]:
        return proposer.propose([0], [np.array(tokens, np.int32)], [most])[0].tolist()

    assert guess(7) == []
    assert guess(7, 1) == []
    assert guess(7, 1, 2, 3, 9, 1, 2) == [3, 9, 1, 2], "a pair"
    assert guess(7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2, most=2) == [3, 9], "a triple goes before a later pair"
    assert guess(7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 5, 5, 5) == [5, 5, 5, 5], "its own end"
    proposer.open(0, request.streams[0][0])
    assert guess(1, 2) == []


# On a real model ------------------------------------------------------------------------------------------------------


@dataclass
class Small:
    """A tiny aligned model, and the folder it lies in."""

    shelf: Shelf
    folder: Path

    def turns(self, proposer: Proposer | None) -> Turns:
        model = self.shelf.model

        def fill(weights: WeightSet, number: int) -> None:
            for name, tensor in self.shelf.weights(number).items():
                weights.tensors[name].copy_(tensor)

        return Turns(
            forward=ModelForward(model, KvPages(model.shape, pages=6, dtype=model.dtype, device="cpu")),
            weights=WeightSets(model.weights()),
            fill=fill,
            context=100,
            pages=6,
            page_tokens=PAGE_TOKENS,
            proposer=proposer,
        )

    def draft_model(self) -> Proposer:
        model = self.shelf.model
        return ModelProposer.load(self.folder, model, self.folder, slots=3, max_tokens=100, step_tokens=16)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    return Small(Shelf(folder, DiskTransport(folder), request.param, aligned=True), folder)


BIASED = SamplingParams(temperature=0.7, top_p=0.8, logit_bias=LogitBias((3, 5), (1.5, -2.0)))
SHARP = SamplingParams(temperature=0.05)


def generate(loop: Turns) -> list[Generated]:
    with torch.inference_mode():
        for index, sampling in enumerate((SHARP, BIASED, *SAMPLINGS, SHARP)):
            loop.submit(tuple(range(1, 3 + 8 * index)), 50, sampling=sampling, stop=(4,) if index == 3 else ())
            loop.turn(2)
        return loop.finish()


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_in_aligned_mode_streams_are_the_same_to_the_bit(small: Small, kind: str) -> None:
    with_it = generate(small.turns(NgramProposer() if kind == "ngram" else small.draft_model()))
    drafted = sum(done.end.drafted_tokens for done in with_it)
    accepted = sum(done.end.accepted_tokens for done in with_it)
    assert drafted > accepted > 0.1 * drafted
    for left, right in zip(with_it, generate(small.turns(None)), strict=True):
        same(left, right)
        assert (left.kept is None) == (right.kept is None)
        if left.kept is not None and right.kept is not None:
            assert np.array_equal(left.kept.ids, right.kept.ids)
            assert np.array_equal(left.kept.offsets, right.kept.offsets)


def test_a_draft_model_with_the_models_own_weights_is_always_right(small: Small) -> None:
    model = LanguageModel.load(small.folder, small.shelf.model.dtype, "cpu")
    model.use(small.shelf.weights(1))
    align(model)
    loop = small.turns(ModelProposer(model, slots=3, max_tokens=100, step_tokens=16))
    with torch.inference_mode():
        loop.submit(tuple(range(1, 41)), 51)
        (done,) = loop.finish()
    assert done.end.accepted_tokens == done.end.drafted_tokens > 35


def other_vocabulary(folder: Path, change: Callable[[dict[str, int]], None]) -> Path:
    """A tiny model whose tokenizer differs."""
    folder.mkdir()
    save_character_tokenizer(folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    change(described["model"]["vocab"])
    file.write_text(json.dumps(described))
    make_tiny("arithmetic", 0, folder)
    return folder


def test_a_draft_model_that_does_not_fit_is_refused_by_name(small: Small, tmp_path: Path) -> None:
    def swapped(vocabulary: dict[str, int]) -> None:
        vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]

    more = other_vocabulary(tmp_path / "more", lambda vocabulary: vocabulary.update({"!": len(vocabulary)}))
    other = other_vocabulary(tmp_path / "other", swapped)
    for folder, tokens, reason in (
        (more, 100, "its vocabulary has 53 tokens"),
        (other, 100, "token '7' has another id"),
        (small.folder, 1000, "was made for 256 tokens"),
    ):
        with pytest.raises(ConfigError, match=f"engine.draft_model = '{folder}' cannot draft: .*{reason}"):
            ModelProposer.load(folder, small.shelf.model, small.folder, slots=3, max_tokens=tokens, step_tokens=16)


def test_commits_and_aborts_with_a_draft_model(small: Small) -> None:
    loop = small.turns(small.draft_model())
    with torch.inference_mode():
        for index in range(4):
            loop.submit(tuple(range(1, 20 + index)), 40)
        loop.turn(4)
        loop.commit(InFlightMode.CONTINUE)
        loop.turn(2)
        loop.abort(1)
        loop.commit(InFlightMode.RECOMPUTE)
        for index, done in enumerate(loop.finish()):
            assert index == 1 or len(done.text) == 40
            assert np.all(np.diff(done.policy_version) >= 0)
            assert np.all(done.kv_version <= done.policy_version)
