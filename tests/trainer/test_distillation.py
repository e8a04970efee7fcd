"""On-policy distillation: the worked examples, the expected gradients, and what must not change them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_fixture import FIXTURE, MASK, close, flat

from fathom.config.distillation import DistillationConfig
from fathom.config.families import DistillationForm, IdSet, IdWeight
from fathom.trainer.objective.distillation import (
    SETS,
    WEIGHTS,
    ComparedTokens,
    compare,
    compared_loss,
    distilled_advantage,
    reverse_kl,
)

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("distillation_vectors.json").read_text())
TEACHERS = {"t": {"path": "teacher"}}


def config_of(**options: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": TEACHERS, **options})


def vocabulary(logp_teacher: torch.Tensor) -> ComparedTokens:
    """All ids at each token of float64 [N, V]."""
    everywhere = torch.ones(logp_teacher.numel(), dtype=torch.bool)
    return ComparedTokens(
        offsets=torch.arange(len(logp_teacher) + 1) * logp_teacher.shape[1],
        logp_teacher=logp_teacher.flatten(),
        of_student=~everywhere,
        of_teacher=everywhere,
    )


def test_the_dicts_cover_their_families() -> None:
    assert set(SETS) == set(IdSet)
    assert set(WEIGHTS) == set(IdWeight)


def test_sampled_token_vectors() -> None:
    vector = VECTORS["opd_sampled_token"]
    old, teacher = flat(FIXTURE["logp_old"]), flat(VECTORS["logp_teacher"])
    close(reverse_kl(old, teacher), flat(vector["expected"]["reverse_kl"]))
    close(reverse_kl(old, teacher).mean(), vector["expected"]["reverse_kl_token_mean"])
    rewards = torch.tensor(FIXTURE["reward"], dtype=torch.float64)
    base = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    per_token = torch.tensor([base[i] for i, row in enumerate(FIXTURE["mask"]) for m in row if m])
    weight = vector["inputs"]["lambda"]
    close(distilled_advantage(per_token, old, teacher, weight), flat(vector["expected"]["advantage"]))
    pure = distilled_advantage(torch.zeros(sum(MASK), dtype=torch.float64), old, teacher, weight)
    close(pure, flat(vector["expected"]["pure_opd_advantage"]))
    assert not distilled_advantage(per_token, old.requires_grad_(), teacher, weight).requires_grad


def top_k_example() -> tuple[torch.Tensor, ComparedTokens]:
    given_ = VECTORS["opd_top_k"]["inputs"]
    student = {**given_["student_topk"], **given_["student_on_teacher"]}
    teacher = {**given_["teacher_topk"], **given_["teacher_on_student"]}
    ids = sorted(student, key=int)
    compared = ComparedTokens(
        offsets=torch.tensor([0, len(ids)]),
        logp_teacher=torch.tensor([teacher[i] for i in ids], dtype=torch.float64),
        of_student=torch.tensor([i in given_["student_topk"] for i in ids]),
        of_teacher=torch.tensor([i in given_["teacher_topk"] for i in ids]),
    )
    return torch.tensor([student[i] for i in ids], dtype=torch.float64), compared


@pytest.mark.parametrize(("ids", "weight"), [*itertools.product(IdSet, IdWeight)])
def test_top_k_vectors(ids: IdSet, weight: IdWeight) -> None:
    name = f"{ids.value.replace('_', '-')}/{weight.value}"
    student, compared = top_k_example()
    loss, has = compare(ids, weight, student, compared)
    assert has.tolist() == [True]
    close(loss, [VECTORS["opd_top_k"]["expected"][name]])


@pytest.mark.parametrize(("ids", "weight"), [*itertools.product(IdSet, IdWeight)])
def test_every_id_is_pushed_towards_the_teacher(ids: IdSet, weight: IdWeight) -> None:
    student, compared = top_k_example()
    student.requires_grad_()
    compare(ids, weight, student, compared)[0].sum().backward()
    assert student.grad is not None
    chosen = SETS[ids](compared.of_student, compared.of_teacher)
    assert student.grad[~chosen].tolist() == [0.0] * int((~chosen).sum())
    assert torch.equal(student.grad[chosen].sign(), (student - compared.logp_teacher)[chosen].sign())


def test_full_vocabulary_vectors() -> None:
    vector = VECTORS["opd_full_vocab"]
    logits = torch.tensor([vector["inputs"]["student_logits"]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([vector["inputs"]["teacher_logits"]], dtype=torch.float64).log_softmax(1)
    config = config_of(form="full_vocabulary")
    loss, _ = compared_loss(config, logits.log_softmax(1).flatten(), vocabulary(teacher))
    close(loss.detach(), [vector["expected"]["reverse_kl"]])
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    close(gradient[0], vector["expected"]["d_reverse_kl_d_student_logits"])


def test_the_sampled_token_estimates_the_full_vocabulary() -> None:
    """Policy gradient of -A log p, averaged over all tokens by their probability, is the gradient of the reverse KL."""
    vector = VECTORS["opd_full_vocab"]
    logits = torch.tensor(vector["inputs"]["student_logits"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(vector["inputs"]["teacher_logits"], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    advantage = distilled_advantage(torch.zeros(4, dtype=torch.float64), logp, teacher, 1.0)
    (gradient,) = torch.autograd.grad((logp.detach().exp() * -advantage * logp).sum(), logits)
    close(gradient, vector["expected"]["d_reverse_kl_d_student_logits"])


def test_top_k_of_the_whole_vocabulary_is_the_full_form() -> None:
    random = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 6, generator=random, dtype=torch.float64).log_softmax(1) for _ in range(2))
    whole = vocabulary(teacher)
    full = compared_loss(config_of(form="full_vocabulary"), student.flatten(), whole)[0]
    top = config_of(form="top_k", top_k=6, set="only_teacher", weight="student_p")
    close(compared_loss(top, student.flatten(), whole)[0], full)
    close(full, (student.exp() * (student - teacher)).sum(1))


def test_a_token_without_an_id_to_compare_counts_as_nothing() -> None:
    compared = ComparedTokens(
        offsets=torch.tensor([0, 2, 2, 3]),
        logp_teacher=torch.tensor([-1.0, -2.0, -0.5]),
        of_student=torch.tensor([True, False, True]),
        of_teacher=torch.tensor([False, True, True]),
    )
    student = torch.tensor([-0.3, -3.0, -0.5], requires_grad=True)
    loss, has = compare(IdSet.INTERSECTION, IdWeight.STUDENT_P, student, compared)
    assert has.tolist() == [False, False, True]
    assert loss.tolist() == [0.0, 0.0, 0.0]
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()


@st.composite
def ragged(draw):
    """(ids at each token, an order of the tokens, a seed)."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=7))
    return lengths, draw(st.permutations(range(len(lengths)))), draw(st.integers(0, 2**31))


@settings(max_examples=60, deadline=None)
@given(ragged(), st.sampled_from(IdSet), st.sampled_from(IdWeight))
def test_tokens_do_not_depend_on_each_other(ragged_ids, ids, weight) -> None:
    lengths, order, seed = ragged_ids
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    compared = ComparedTokens(
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        logp_teacher=-20 * torch.rand(count, generator=random, dtype=torch.float64),
        of_student=torch.rand(count, generator=random) < 0.6,
        of_teacher=torch.rand(count, generator=random) < 0.6,
    )
    student = (-20 * torch.rand(count, generator=random, dtype=torch.float64)).requires_grad_()
    whole, has = compare(ids, weight, student, compared)
    index = torch.tensor(order)
    taken, places = compared.take(index), compared.places(index)
    part, part_has = compare(ids, weight, student[places], taken)
    torch.testing.assert_close(part, whole[index], rtol=1e-12, atol=1e-12)
    assert part_has.tolist() == has[index].tolist()
    (one,) = torch.autograd.grad(whole.sum(), student, retain_graph=True)
    (other,) = torch.autograd.grad(part.sum(), student)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_form_has_a_config() -> None:
    assert {config_of(form=form.value).form for form in DistillationForm} == set(DistillationForm)
