"""Steps of fine-tuning and of preference training on a real backend: packing and order change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rows import VOCAB, save_model

from fathom.config.families import Aggregation
from fathom.config.trainer import OptimizerConfig, TrainerConfig
from fathom.config.tuning.preference import PreferenceObjectiveConfig
from fathom.config.tuning.supervised import SupervisedObjectiveConfig
from fathom.core.errors import RecordError, StepStoppedError
from fathom.core.records.demonstration import Demonstration
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.tuning.imitation import ImitationCourse
from fathom.trainer.tuning.order import SampleOrder
from fathom.trainer.tuning.preference import PreferenceCourse
from fathom.trainer.tuning.samples import Conversation, Pair

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def backend(folder, lr=1e-2):
    optimizer = OptimizerConfig(lr=lr)
    return TorchBackend(folder, TrainerConfig(steps=5, groups_per_step=1, optimizer=optimizer))


def row(rng, prompt, answer, ids=None):
    token_ids = rng.integers(0, VOCAB, prompt + answer).astype(np.int32)
    if ids is not None:
        token_ids[:prompt] = ids[:prompt]
    return Demonstration(token_ids=token_ids, loss_mask=np.arange(prompt + answer) >= prompt, source="made")


def conversations(count=6):
    rng = np.random.default_rng(0)
    return [
        Conversation(rows=tuple(row(rng, 2 + n % 3, 1 + (n * 5 + part) % 7) for part in range(1 + n % 2)))
        for n in range(count)
    ]


def pairs(count=6):
    rng = np.random.default_rng(1)
    made = []
    for n in range(count):
        prompt = rng.integers(0, VOCAB, 4)
        chosen, rejected = row(rng, 4, 1 + n % 4, prompt), row(rng, 4, 2 + n % 3, prompt)
        made.append(Pair(chosen=(chosen,), rejected=(rejected,)))
    return made


def trained(folder, course_of, take):
    """Weights after one step."""
    policy = backend(folder)
    outcome = take(course_of(policy))
    return {name: tensor.detach().clone() for name, tensor in policy.weights().items()}, outcome


def close(one, other):
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN])
def test_imitation_does_not_depend_on_micro_batches_or_order(folder, aggregation):
    objective, shown = SupervisedObjectiveConfig(aggregation=aggregation), conversations()
    whole, first = trained(folder, lambda b: ImitationCourse(b, objective, 4096), lambda c: c.step(shown))
    cut, second = trained(folder, lambda b: ImitationCourse(b, objective, 1), lambda c: c.step(shown[::-1]))
    close(whole, cut)
    assert second.sums.loss == pytest.approx(first.sums.loss, rel=1e-5)
    assert first.sums.tokens == second.sums.tokens == sum(int(r.loss_mask.sum()) for c in shown for r in c.rows)
    assert first.update.grad_norm == pytest.approx(second.update.grad_norm, rel=1e-5)


def test_preference_does_not_depend_on_micro_batches_or_order(folder):
    objective, both = PreferenceObjectiveConfig(beta=0.5), pairs()
    reference = PreferenceCourse(backend(folder), objective, 4096).score(both)
    whole, first = trained(folder, lambda b: PreferenceCourse(b, objective, 4096), lambda c: c.step(both, reference))
    cut, second = trained(
        folder, lambda b: PreferenceCourse(b, objective, 1), lambda c: c.step(both[::-1], reference[::-1].copy())
    )
    close(whole, cut)
    assert first.sums.loss == pytest.approx(np.log(2), rel=1e-5), "the policy is still the reference"
    assert second.sums.loss == pytest.approx(first.sums.loss, rel=1e-5)
    assert first.sums.pairs == second.sums.pairs == len(both)


def test_both_learn(folder):
    policy, shown = backend(folder), conversations()
    course = ImitationCourse(policy, SupervisedObjectiveConfig(), 64)
    losses = [course.step(shown).sums.nll for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    scores = course.evaluate(shown)
    assert -sum(scores.logprobs) == pytest.approx(course.step(shown).sums.nll, rel=1e-5)
    policy, both = backend(folder), pairs()
    preference = PreferenceCourse(policy, PreferenceObjectiveConfig(), 64)
    reference = preference.score(both)
    steps = [preference.step(both, reference) for _ in range(30)]
    assert steps[-1].sums.correct == len(both)
    assert steps[-1].sums.chosen_reward > 0 > steps[-1].sums.rejected_reward


def test_a_step_that_is_stopped_leaves_nothing_behind(folder):
    policy, shown = backend(folder), conversations()
    course = ImitationCourse(policy, SupervisedObjectiveConfig(), 1)
    answers = iter([False, True])
    with pytest.raises(StepStoppedError):
        course.step(shown, lambda: next(answers))
    assert policy.step == 0
    again, _ = trained(folder, lambda b: ImitationCourse(b, SupervisedObjectiveConfig(), 1), lambda c: c.step(shown))
    course.step(shown)
    for name, tensor in policy.weights().items():
        assert torch.equal(tensor, again[name])


def test_a_sample_without_rows_is_none():
    with pytest.raises(RecordError):
        Conversation(rows=())
    with pytest.raises(RecordError):
        Pair(chosen=(), rejected=())


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    budget=st.integers(1, 60),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    done=st.integers(0, 50),
)
def test_every_epoch_takes_every_sample_once_within_the_budget(tokens, budget, seed, shuffle, done):
    order = SampleOrder(tokens, tokens_per_step=budget, seed=seed, shuffle=shuffle)
    for epoch in (0, 3):
        steps = order.epoch(epoch)
        taken = [sample for step in steps for sample in step]
        assert sorted(taken) == list(range(len(tokens)))
        assert shuffle or taken == sorted(taken)
        assert all(sum(tokens[s] for s in step) <= budget or len(step) == 1 for step in steps)
    until = order.steps_in(4)
    whole = list(order.steps(0, until))
    assert [batch.number for batch in whole] == list(range(1, until + 1))
    assert list(order.steps(min(done, until), until)) == whole[done:], "a resumed run goes on with the next step"


def test_a_step_without_a_finite_token_moves_nothing(folder):
    """Its gradient is 0, and by AdamW's momentum the weights would go on all the same."""
    policy, shown, both = backend(folder), conversations(), pairs()
    imitation = ImitationCourse(policy, SupervisedObjectiveConfig(), 64)
    preference = PreferenceCourse(policy, PreferenceObjectiveConfig(), 64)
    reference = preference.score(both)
    assert imitation.step(shown).update.applied
    before = {name: tensor.detach().clone() for name, tensor in policy.weights().items()}
    with torch.no_grad():
        norm = policy.masters["model.norm.weight"]
        norm.fill_(torch.nan)
    refused = [imitation.step(shown), preference.step(both, reference)]
    assert [(step.sums.tokens, step.update.applied) for step in refused] == [(0, False)] * 2
    assert refused[0].sums.non_finite == sum(int(r.loss_mask.sum()) for c in shown for r in c.rows)
    assert refused[1].sums.non_finite == len(both)
    assert policy.step == 1
    for name, tensor in policy.weights().items():
        assert name == "model.norm.weight" or torch.equal(tensor, before[name])
