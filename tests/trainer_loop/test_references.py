"""The KL reference: frozen, kept again every so many steps, or an average; it survives a resume bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from random_rows import make_group, make_row, save_model

from fathom.config.families import Dtype, KlPlacement, ReferenceKind
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import OptimizerConfig, ReferenceConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import CheckpointError
from fathom.core.records.step import TrainBatch
from fathom.sync.digest import digest
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

FROZEN = ReferenceConfig()
PERIODIC = ReferenceConfig(kind=ReferenceKind.PERIODIC, every_steps=2)
EMA = ReferenceConfig(kind=ReferenceKind.EMA, decay=0.75)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _backend(folder, reference, dtype=Dtype.FLOAT32) -> TorchBackend:
    optimizer = OptimizerConfig(lr=1e-2)
    return TorchBackend(
        folder, TrainerConfig(steps=9, groups_per_step=1, dtype=dtype, optimizer=optimizer, reference=reference)
    )


def _rows(seed=0):
    rng = np.random.default_rng(seed)
    return PackedRows.of_rows([make_row(rng, f"t{i}", sampled=3 + i) for i in range(2)])


def _train(backend, steps):
    for step in range(backend.step, backend.step + steps):
        backend.accumulate(_rows(step), lambda outputs: (-outputs.logprobs.mean(), None))
        assert backend.update().applied


def _weights(backend):
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def test_a_frozen_reference_is_where_it_was_kept(folder):
    backend = _backend(folder, FROZEN)
    assert backend.reference_digest is None
    backend.keep_reference()
    kept = digest(backend.weights())
    _train(backend, 3)
    assert backend.reference_digest == kept != digest(backend.weights())


def test_a_periodic_reference_is_the_policy_of_the_latest_multiple(folder):
    backend = _backend(folder, PERIODIC)
    backend.keep_reference()
    expected = []
    for step in range(1, 6):
        _train(backend, 1)
        if step % 2 == 0:
            expected.append((digest(backend.weights()), backend.logprobs(_rows())))
        if expected:
            assert backend.reference_digest == expected[-1][0]
            assert torch.equal(backend.reference_logprobs(_rows()), expected[-1][1])
    assert len({kept for kept, _ in expected}) == 2


@pytest.mark.parametrize("dtype", Dtype)
def test_an_average_follows_the_masters(folder, dtype):
    backend = _backend(folder, EMA, dtype)
    averages = {name: master.detach().float().clone() for name, master in backend.masters.items()}
    backend.keep_reference()
    seen = {backend.reference_digest}
    for _ in range(3):
        _train(backend, 1)
        averages = {n: average.lerp(backend.masters[n].detach(), 0.25) for n, average in averages.items()}
        cast = {n: averages[n].to(tensor.dtype) for n, tensor in backend.weights().items()}
        assert backend.reference_digest == digest(cast)
        seen.add(backend.reference_digest)
    assert len(seen) == 4


def test_an_average_in_bfloat16_keeps_movements_that_the_cast_cannot_see(folder):
    """A hundred steps of a thousandth of a small step each: added up in bfloat16 they would all be lost."""
    slow = ReferenceConfig(kind=ReferenceKind.EMA, decay=0.999)
    backend = _backend(folder, slow, Dtype.BFLOAT16)
    backend.keep_reference()
    kept = backend.reference_digest
    _train(backend, 100)
    assert backend.reference_digest != kept


@pytest.mark.parametrize("reference", [FROZEN, PERIODIC, EMA], ids=lambda config: config.kind)
@pytest.mark.parametrize("dtype", Dtype)
def test_it_survives_a_resume_bit_for_bit(folder, reference, dtype, tmp_path):
    straight = _backend(folder, reference, dtype)
    straight.keep_reference()
    _train(straight, 3)
    straight.save(tmp_path)
    resumed = _backend(folder, reference, dtype)
    resumed.load(tmp_path)
    for _ in range(3):
        assert resumed.reference_digest == straight.reference_digest
        assert torch.equal(resumed.reference_logprobs(_rows(7)), straight.reference_logprobs(_rows(7)))
        _train(straight, 1)
        _train(resumed, 1)


def test_a_checkpoint_of_another_kind_of_reference_is_refused(folder, tmp_path):
    backend = _backend(folder, FROZEN, Dtype.BFLOAT16)
    backend.keep_reference()
    _train(backend, 1)
    backend.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"another trainer\.reference"):
        _backend(folder, EMA, Dtype.BFLOAT16).load(tmp_path)


def test_an_update_that_is_not_applied_moves_no_reference(folder):
    backend = _backend(folder, EMA)
    backend.keep_reference()
    _train(backend, 1)
    before = backend.reference_digest
    backend.accumulate(_rows(), lambda outputs: (outputs.logprobs.sum() * float("nan"), None))
    assert not backend.update().applied
    assert backend.reference_digest == before


@pytest.mark.parametrize("placement", KlPlacement)
@pytest.mark.parametrize("reference", [FROZEN, PERIODIC, EMA], ids=lambda config: config.kind)
def test_each_step_names_the_reference_it_used(folder, reference, placement):
    """By the digest of its weights, with its log-probabilities beside those of policy and behaviour."""
    backend = _backend(folder, reference)
    objective = ObjectiveConfig(kl_coefficient=0.1, kl_placement=placement)
    config = TrainerConfig(steps=9, groups_per_step=1, optimizer=OptimizerConfig(lr=1e-2), reference=reference)
    trainer = Trainer(backend, config, objective, StalenessConfig(max_staleness=9))
    trainer.begin()
    rng, named = np.random.default_rng(1), []
    for version in range(4):
        rows = [make_row(rng, f"t{i}", sampled=3 + i) for i in range(2)]
        expected = backend.reference_digest, backend.reference_logprobs(PackedRows.of_rows(rows)).numpy()
        (outcome,) = trainer.steps(TrainBatch(groups=(make_group(rows, [1.0, 0.0]),)), version)
        assert outcome.reference == expected[0]
        told = np.concatenate([row.reference_logprobs for row in outcome.rows])
        np.testing.assert_allclose(told, expected[1], atol=1e-6)
        named.append(outcome.reference)
    changes = {ReferenceKind.FROZEN: 1, ReferenceKind.PERIODIC: 2, ReferenceKind.EMA: 4}
    assert len(set(named)) == changes[reference.kind]


def test_a_step_without_a_reference_names_none(folder):
    backend = _backend(folder, FROZEN)
    config = TrainerConfig(steps=9, groups_per_step=1)
    trainer = Trainer(backend, config, ObjectiveConfig(), StalenessConfig())
    trainer.begin()
    rows = [make_row(np.random.default_rng(1), f"t{i}") for i in range(2)]
    (outcome,) = trainer.steps(TrainBatch(groups=(make_group(rows, [1.0, 0.0]),)), 0)
    assert outcome.reference is None
    assert outcome.rows[0].reference_logprobs is None


def test_options_of_other_kinds_are_refused():
    with pytest.raises(ValidationError, match="every_steps changes nothing with kind = 'frozen'"):
        ReferenceConfig(every_steps=3)
    with pytest.raises(ValidationError, match="decay changes nothing with kind = 'periodic'"):
        ReferenceConfig(kind=ReferenceKind.PERIODIC, every_steps=3, decay=0.9)
    for kind in (ReferenceKind.PERIODIC, ReferenceKind.EMA):
        with pytest.raises(ValidationError, match=f"kind = '{kind}' needs"):
            ReferenceConfig(kind=kind)
