"""Distillation within the step's loss: the worked example through it, and cuts that must not change it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_fixture import FIXTURE, PLAIN, SEQUENCE, SEQUENCES, close, fixture_tokens, flat, theta

from fathom.config.distillation import DistillationConfig
from fathom.config.families import Aggregation, DistillationForm, IdSet, IdWeight, ObjectiveKind
from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.distillation import ComparedTokens, TaughtTokens, compared_loss, distilled_advantage
from fathom.trainer.objective.objective import LossSums, micro_batch_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import StepTokens, prepare_step

VECTORS = json.loads(Path(__file__).with_name("distillation_vectors.json").read_text())


def config_of(**options: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": {"t": {"path": "teacher"}}, **options})


def with_teacher(tokens: StepTokens, taught: TaughtTokens | None, advantage: torch.Tensor | None = None) -> StepTokens:
    return StepTokens(
        sequence=tokens.sequence,
        sequences=tokens.sequences,
        advantage=tokens.advantage if advantage is None else advantage,
        truncated=tokens.truncated,
        logp_behaviour=tokens.logp_behaviour,
        logp_old=tokens.logp_old,
        logp_ref=tokens.logp_ref,
        taught=taught,
    )


def test_the_sampled_tokens_of_a_teacher_are_in_the_advantages() -> None:
    vector = VECTORS["opd_sampled_token"]
    taught = TaughtTokens(config=config_of(coefficient=0.5), logp_teacher=flat(VECTORS["logp_teacher"]))
    plain = fixture_tokens(PLAIN)
    one, other = (
        micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=theta()))
        for tokens in (
            with_teacher(plain, taught),
            with_teacher(plain, None, flat(vector["expected"]["advantage"])),
        )
    )
    close(one.loss.detach(), other.loss.detach())
    close(one.sums.reverse_kl / one.sums.tokens, vector["expected"]["reverse_kl_token_mean"])
    assert one.sums.compared == 0
    pure = with_teacher(plain, taught, torch.zeros_like(plain.advantage))
    told = with_teacher(plain, None, flat(vector["expected"]["pure_opd_advantage"]))
    close(
        *(
            micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=theta())).loss.detach()
            for tokens in (pure, told)
        )
    )


def test_without_an_old_pass_the_student_is_the_forward_before_the_step() -> None:
    taught = TaughtTokens(config=config_of(), logp_teacher=flat(VECTORS["logp_teacher"]))
    losses = []
    for old in ("logp_theta", None):
        tokens, logp = with_teacher(fixture_tokens(PLAIN, old=old), taught), theta()
        terms = micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=logp))
        terms.loss.backward()
        losses.append((float(terms.loss.detach()), logp.grad.tolist(), terms.sums.reverse_kl))
    assert losses[0] == losses[1]


@st.composite
def taught_steps(draw):
    """(objective, distillation, rows as lengths and trajectories, an order of the rows, cuts of it, a seed)."""
    kind = draw(st.sampled_from([ObjectiveKind.GRPO, ObjectiveKind.CISPO, ObjectiveKind.RLOO]))
    objective = ObjectiveConfig(kind=kind, aggregation=draw(st.sampled_from(list(Aggregation)[:3])))
    form = draw(st.sampled_from(DistillationForm))
    options = {"form": form, "coefficient": 0.7}
    if form is DistillationForm.TOP_K:
        options |= {"set": draw(st.sampled_from(IdSet)), "weight": draw(st.sampled_from(IdWeight))}
    sequences = draw(st.integers(1, 4))
    rows = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, sequences - 1)), min_size=1, max_size=6))
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    return objective, config_of(**options), sequences, rows, order, cuts, draw(st.integers(0, 2**31))


def random_step(objective, distillation, sequences, rows, seed):
    random = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([trajectory for length, trajectory in rows for _ in range(length)])
    count = len(sequence)

    def draws(size: int) -> torch.Tensor:
        return -3 * torch.rand(size, generator=random, dtype=torch.float64)

    widths = torch.randint(0, 5, (count,), generator=random)
    if distillation.form is DistillationForm.FULL_VOCABULARY:
        widths = torch.full((count,), 4)
    ids = int(widths.sum())
    of_teacher = torch.rand(ids, generator=random) < 0.7
    everywhere = distillation.form is DistillationForm.FULL_VOCABULARY
    compared = ComparedTokens(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)]),
        logp_teacher=draws(ids),
        of_student=~of_teacher | (torch.rand(ids, generator=random) < 0.3),
        of_teacher=of_teacher | everywhere,
    )
    sampled_only = distillation.form is DistillationForm.SAMPLED_TOKEN
    taught = TaughtTokens(config=distillation, logp_teacher=draws(count), compared=None if sampled_only else compared)
    old = draws(count)
    tokens = StepTokens(
        sequence=sequence,
        sequences=sequences,
        advantage=torch.randn(sequences, generator=random, dtype=torch.float64)[sequence],
        truncated=torch.zeros(count, dtype=torch.bool),
        logp_behaviour=old + 0.3 * torch.randn(count, generator=random, dtype=torch.float64),
        logp_old=old,
        taught=taught,
    )
    return tokens, old + 0.2 * torch.randn(count, generator=random, dtype=torch.float64), draws(ids)


def run(objective, tokens, theta_, ids, parts):
    plan = prepare_step(objective, tokens)
    logp, logp_ids = theta_.clone().requires_grad_(), ids.clone().requires_grad_()
    sums = LossSums()
    for part in parts:
        places = None if tokens.taught.compared is None else tokens.taught.compared.places(part)
        outputs = TokenOutputs(logprobs=logp[part], ids=None if places is None else logp_ids[places])
        terms = micro_batch_loss(objective, plan.take(part), outputs)
        terms.loss.backward()
        sums = sums + terms.sums
    nothing = torch.zeros_like(logp_ids)
    return sums, logp.grad, nothing if logp_ids.grad is None else logp_ids.grad


@settings(max_examples=100, deadline=None)
@given(taught_steps())
def test_loss_and_gradient_do_not_depend_on_the_cut(step) -> None:
    objective, distillation, sequences, rows, order, cuts, seed = step
    tokens, theta_, ids = random_step(objective, distillation, sequences, rows, seed)
    starts = [0]
    for length, _ in rows:
        starts.append(starts[-1] + length)
    edges = [0, *cuts, len(rows)]
    parts = [
        torch.tensor([t for row in order[a:b] for t in range(starts[row], starts[row + 1])], dtype=torch.int64)
        for a, b in pairwise(edges)
    ]
    whole, gradient, id_gradient = run(objective, tokens, theta_, ids, [torch.arange(len(theta_))])
    cut, cut_gradient, cut_ids = run(objective, tokens, theta_, ids, parts)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-12)
    assert cut.reverse_kl == pytest.approx(whole.reverse_kl, rel=1e-12, abs=1e-12)
    assert cut.compared == pytest.approx(whole.compared, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cut_ids, id_gradient, rtol=1e-12, atol=1e-12)


def by_ids(form: str = "full_vocabulary") -> tuple[StepTokens, torch.Tensor]:
    """The fixture's nine tokens with three ids each."""
    random = torch.Generator().manual_seed(4)
    everywhere = torch.ones(27, dtype=torch.bool)
    compared = ComparedTokens(
        offsets=torch.arange(10) * 3,
        logp_teacher=torch.randn(9, 3, generator=random, dtype=torch.float64).log_softmax(1).flatten(),
        of_student=~everywhere,
        of_teacher=everywhere,
    )
    taught = TaughtTokens(config=config_of(form=form), logp_teacher=flat(VECTORS["logp_teacher"]), compared=compared)
    student = torch.randn(9, 3, generator=random, dtype=torch.float64).log_softmax(1).flatten()
    return with_teacher(fixture_tokens(PLAIN), taught, torch.zeros(9, dtype=torch.float64)), student


def test_ids_are_a_term_of_their_own_without_a_weight() -> None:
    tokens, student = by_ids()
    assert tokens.taught is not None
    assert tokens.taught.compared is not None
    terms = micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=theta(), ids=student))
    expected, _ = compared_loss(tokens.taught.config, student, tokens.taught.compared)
    close(terms.loss.detach(), expected.mean())
    assert terms.sums.compared == pytest.approx(float(expected.sum()))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_token_with_an_id_that_is_no_number_is_refused_and_counted(bad: float) -> None:
    tokens, student = by_ids()
    student[4] = bad
    logp, ids = theta(), student.requires_grad_()
    terms = micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=logp, ids=ids))
    terms.loss.backward()
    assert (terms.sums.non_finite, terms.sums.tokens) == (1, 8)
    assert terms.loss.isfinite()
    assert ids.grad is not None
    assert ids.grad[3:6].tolist() == [0.0] * 3
    assert ids.grad.isfinite().all()


def test_what_does_not_belong_together_is_refused() -> None:
    tokens, student = by_ids()
    with pytest.raises(ValueError, match="how likely they are"):
        micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=theta()))
    with pytest.raises(ValueError, match="how likely they are"):
        micro_batch_loss(PLAIN, prepare_step(PLAIN, tokens), TokenOutputs(logprobs=theta(), ids=student[:-1]))
    with pytest.raises(ValueError, match="do not go together"):
        TaughtTokens(config=config_of(form="top_k"), logp_teacher=torch.zeros(9))


def test_a_teacher_at_another_temperature_gives_another_loss() -> None:
    """The temperature is part of what the teacher says: what is recorded with it is what the trainer compares."""
    logits = torch.tensor([2.0, 0.5, -1.0], dtype=torch.float64)
    base, old = torch.zeros(3, dtype=torch.float64), (logits / 0.5).log_softmax(0)
    same = distilled_advantage(base, old, (logits / 0.5).log_softmax(0), 1.0)
    other = distilled_advantage(base, old, logits.log_softmax(0), 1.0)
    assert same.tolist() == [0.0, 0.0, 0.0]
    assert other.abs().min() > 0.1


def test_the_fixture_is_the_one_of_the_vectors() -> None:
    assert len(SEQUENCE) == 9
    assert len(FIXTURE["mask"]) == SEQUENCES
