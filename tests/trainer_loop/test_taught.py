"""Rows that teachers scored, through a real forward: which are trained, what is recorded, and the gradient of ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_rows import VOCAB, make_group, make_row, save_model

from fathom.config.distillation import DistillationConfig
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.records.scores import ComparedIds, IdLists, TeacherScores
from fathom.core.records.step import MaskReason, TrainBatch
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

torch.set_num_threads(1)
NO_TEACHER = list(MaskReason).index(MaskReason.NO_TEACHER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def config_of(**options: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": {"t": {"path": "teacher"}}, **options})


def trainer_of(folder, distillation):
    config = TrainerConfig(steps=20, groups_per_step=2, optimizer=OptimizerConfig(lr=1e-2))
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, ObjectiveConfig(), StalenessConfig(max_staleness=100), distillation)
    trainer.begin()
    return trainer, backend


def scores(row, *, temperature=None, compared=None, shift=0.0):
    logprobs = np.minimum(row.logprobs - np.float32(shift), 0)
    return TeacherScores(
        teacher="t",
        model="d" * 64,
        temperature=row.temperature if temperature is None else np.full_like(row.temperature, temperature),
        logprobs=logprobs,
        seconds=0.25,
        compared=compared,
    )


def rows_of_three(seed=0):
    rng = np.random.default_rng(seed)
    return [make_row(rng, f"g0/t{i}", prompt=2 + i, sampled=3 + i) for i in range(3)]


def step_on(trainer, rows, rewards=(1.0, 0.0, 0.25)):
    batch = TrainBatch(groups=(make_group(rows, list(rewards)),))
    (outcome,) = trainer.steps(batch, trainer.version)
    return outcome


def whole_vocabulary(count, seed=1):
    """A random teacher's distribution at `count` tokens."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(count, VOCAB)).astype(np.float32))
    every = np.arange(VOCAB, dtype=np.int32)
    yes = np.ones(count * VOCAB, np.bool_)
    return ComparedIds(
        lists=IdLists.of([every] * count),
        logprobs=logits.log_softmax(1).flatten().numpy(),
        of_student=~yes,
        of_teacher=yes,
    )


def test_rows_without_a_teacher_or_of_another_temperature_are_removed_and_counted(folder) -> None:
    trainer, _ = trainer_of(folder, config_of())
    first, second, third = rows_of_three()
    rows = [replace(first, teacher=scores(first)), second, replace(third, teacher=scores(third, temperature=0.5))]
    outcome = step_on(trainer, rows)
    assert outcome.stepped
    assert [set(row.mask_codes.tolist()) for row in outcome.rows] == [{-1}, {NO_TEACHER}, {NO_TEACHER}]
    told = outcome.distillation
    assert told is not None
    assert (told.asked, told.tokens, told.seconds) == (12, 3, 0.5)
    assert told.scored_share == pytest.approx(3 / 12)
    assert told.compared is None
    assert outcome.metrics.rows == 1


def test_with_no_teacher_at_all_nothing_is_trained(folder) -> None:
    trainer, backend = trainer_of(folder, config_of(task_reward=True))
    before = {name: tensor.detach().clone() for name, tensor in backend.weights().items()}
    outcome = step_on(trainer, rows_of_three())
    assert not outcome.stepped
    assert outcome.why_not == "no token is in the gradient; masked: 12 no_teacher"
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights().items())


def test_the_reverse_kl_is_of_the_trainer_before_the_step(folder) -> None:
    trainer, _ = trainer_of(folder, config_of())
    rows = [replace(row, teacher=scores(row, shift=1.0)) for row in rows_of_three()]
    own = np.concatenate(trainer.logprobs(rows))
    expected = float((own - np.concatenate([row.teacher.logprobs for row in rows])).mean())
    outcome = step_on(trainer, rows)
    assert outcome.distillation is not None
    assert outcome.distillation.reverse_kl == pytest.approx(expected, rel=1e-5)


def test_without_the_tasks_reward_a_teacher_that_agrees_teaches_nothing(folder) -> None:
    """The student's own numbers as the teacher's: pure distillation has gradient 0, and with rewards it has not."""
    norms = []
    for task_reward in (False, True):
        trainer, _ = trainer_of(folder, config_of(task_reward=task_reward))
        rows = rows_of_three()
        own = trainer.logprobs(rows)
        rows = [replace(row, logprobs=lp) for row, lp in zip(rows, own, strict=True)]
        outcome = step_on(trainer, [replace(row, teacher=scores(row)) for row in rows])
        norms.append(outcome.metrics.grad_norm)
        assert [abs(row.advantage) < 1e-5 for row in outcome.rows] == [not task_reward] * 3
    assert norms[0] < 1e-5 < 1e-3 < norms[1]


@pytest.mark.parametrize("task_reward", [False, True])
def test_the_advantages_recorded_are_those_trained(folder, task_reward) -> None:
    trainer, _ = trainer_of(folder, config_of(task_reward=task_reward, coefficient=0.5))
    first, second, third = rows_of_three()
    rows = [replace(row, teacher=scores(row, shift=1.0)) for row in (first, second)]
    own = trainer.logprobs(rows)
    outcome = step_on(trainer, [*rows, third], [1.0, 0.0, 0.0])
    spread = np.std([1.0, 0.0, 0.0], ddof=1) + 1e-6
    bases = [value / spread if task_reward else 0.0 for value in (2 / 3, -1 / 3, -1 / 3)]
    for row, told, logprobs, base in zip(rows, outcome.rows, own, bases, strict=False):
        np.testing.assert_allclose(told.advantages, base - 0.5 * (logprobs - row.teacher.logprobs), rtol=1e-4)
        assert told.advantage == pytest.approx(told.advantages.mean(), rel=1e-5)
    removed = outcome.rows[2]
    assert removed.advantages is None, "no teacher has scored it"
    assert removed.advantage == pytest.approx(bases[2])


def test_the_whole_vocabulary_is_learned_by_heart(folder) -> None:
    trainer, _ = trainer_of(folder, config_of(form="full_vocabulary"))
    row = rows_of_three()[2]
    taught = replace(row, teacher=scores(row, compared=whole_vocabulary(len(row.positions))))
    sums = [step_on(trainer, [taught], [0.0]).distillation.compared for _ in range(15)]
    assert sums[-1] < 0.3 * sums[0]
    assert sums[-1] > 0


def test_a_form_needs_its_ids(folder) -> None:
    trainer, _ = trainer_of(folder, config_of(form="full_vocabulary"))
    outcome = step_on(trainer, [replace(row, teacher=scores(row)) for row in rows_of_three()])
    assert not outcome.stepped


def test_ids_of_packed_rows_are_those_of_the_rows_alone(folder) -> None:
    _, backend = trainer_of(folder, None)
    rows = [
        replace(row, temperature=np.full_like(row.temperature, 0.7), teacher=scores(row, compared=compared))
        for row in rows_of_three()
        for compared in [whole_vocabulary(len(row.positions))]
    ]

    def ids_of(some):
        found = []

        def loss_of(outputs):
            found.append(outputs.ids.detach().clone())
            return outputs.ids.sum() * 0, None

        backend.accumulate(PackedRows.of_rows(some), loss_of)
        backend.discard()
        return found[0]

    together = ids_of(rows)
    torch.testing.assert_close(together, torch.cat([ids_of([row]) for row in rows]), rtol=0, atol=1e-5)
    packed = PackedRows.of_rows(rows)
    assert packed.compared is not None
    at = together.reshape(-1, VOCAB)[torch.arange(12), torch.from_numpy(packed.targets)]
    torch.testing.assert_close(at, backend.logprobs(packed), rtol=0, atol=1e-5)
    torch.testing.assert_close(together.reshape(-1, VOCAB).exp().sum(1), torch.ones(12), rtol=0, atol=1e-5)
    taken = packed.take([2, 0])
    assert taken.compared is not None
    assert len(taken.compared.ids) == (5 + 3) * VOCAB
