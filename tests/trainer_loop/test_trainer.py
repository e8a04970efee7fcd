from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_rows import VOCAB, make_group, make_row, save_model

from fathom.config.families import Aggregation, Correction, Dtype, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import BooksError, RecordError, StepStoppedError
from fathom.core.records.step import MaskReason, TrainBatch
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

AGE = list(MaskReason).index(MaskReason.AGE)
TRUNCATED = list(MaskReason).index(MaskReason.TRUNCATED)
OBJECTIVES = [
    ObjectiveConfig(),
    ObjectiveConfig(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, correction=Correction.NONE),
    ObjectiveConfig(correction=Correction.SEQUENCE_TIS, correction_high=50.0, batch_normalise=True),
    ObjectiveConfig(
        correction=Correction.ICEPOP, rejection_denominator=RejectionDenominator.KEPT, kl_coefficient=0.1, veto=1e-4
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _trainer(folder, objective=None, *, staleness=None, lr=1e-2, begin=True, **options):
    options = {"steps": 20, "groups_per_step": 2, "optimizer": OptimizerConfig(lr=lr)} | options
    config = TrainerConfig(**options)
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, objective or ObjectiveConfig(), staleness or StalenessConfig())
    if begin:
        trainer.begin()
    return trainer, backend


def _batch(seed=0, **row_options):
    """Two groups of three trajectories; the first trajectory has two rows."""
    rng = np.random.default_rng(seed)
    groups = []
    for name in ("g0", "g1"):
        rows = [make_row(rng, f"{name}/t{i}", prompt=2 + i, sampled=3 + 2 * i, **row_options) for i in range(3)]
        rows.append(make_row(rng, f"{name}/t0", prompt=6, sampled=2, branch=1, **row_options))
        groups.append(make_group(rows, [1.0, 0.0, 0.25], name))
    return TrainBatch(groups=tuple(groups))


def _on_policy(trainer, batch):
    """The same batch with behaviour log-probabilities that are the trainer's own."""
    groups = []
    for group in batch.groups:
        logprobs = trainer.logprobs(group.rows)
        rows = tuple(replace(row, logprobs=lp) for row, lp in zip(group.rows, logprobs, strict=True))
        groups.append(replace(group, rows=rows))
    return TrainBatch(groups=tuple(groups))


def _copy(backend):
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def _same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


class _Watched:
    """A backend that keeps the gradient it was about to step by."""

    def __init__(self, backend):
        self._backend = backend
        self.gradients = []
        self.forwards = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def accumulate(self, rows, loss_of, *, entropy=False):
        self.forwards.append(len(rows.lengths))
        return self._backend.accumulate(rows, loss_of, entropy=entropy)

    def update(self, *, hold=False):
        self.gradients.append(torch.cat([m.grad.flatten().clone() for m in self._backend.masters.values()]))
        return self._backend.update(hold=hold)


def _gradient(folder, objective, batch, budget):
    config = TrainerConfig(steps=1, groups_per_step=2, tokens_per_micro_batch=budget)
    watched = _Watched(TorchBackend(folder, config))
    trainer = Trainer(watched, config, objective, StalenessConfig())
    trainer.begin()
    (outcome,) = trainer.steps(batch, 0)
    return watched, outcome


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.aggregation}-{o.correction}")
def test_the_result_does_not_depend_on_how_rows_were_cut(folder, objective):
    batch = _batch()
    whole, expected = _gradient(folder, objective, batch, 4096)
    assert whole.forwards == [8]
    for budget in (1, 13, 30):
        cut, outcome = _gradient(folder, objective, batch, budget)
        assert len(cut.forwards) > 1
        scale = float(whole.gradients[0].abs().max())
        assert float((cut.gradients[0] - whole.gradients[0]).abs().max()) < 1e-6 * max(1.0, scale)
        assert outcome.metrics.loss == pytest.approx(expected.metrics.loss, abs=1e-6)
        assert outcome.metrics.tokens == expected.metrics.tokens
        for left, right in zip(outcome.rows, expected.rows, strict=True):
            assert left.trajectory == right.trajectory
            assert left.branch == right.branch
            np.testing.assert_allclose(left.trainer_logprobs, right.trainer_logprobs, atol=1e-5)
            np.testing.assert_allclose(left.weights, right.weights, rtol=1e-4)
            np.testing.assert_array_equal(left.mask_codes, right.mask_codes)


def test_the_result_does_not_depend_on_the_order_of_rows(folder):
    batch = _batch()
    turned = TrainBatch(groups=tuple(replace(group, rows=group.rows[::-1]) for group in batch.groups[::-1]))
    left, _ = _gradient(folder, ObjectiveConfig(), batch, 4096)
    right, outcome = _gradient(folder, ObjectiveConfig(), turned, 4096)
    assert float((left.gradients[0] - right.gradients[0]).abs().max()) < 1e-6
    assert [row.trajectory for row in outcome.rows] == [row.trajectory for g in turned.groups for row in g.rows]


def test_two_rows_of_one_and_nine_tokens_are_averaged_over_ten(folder):
    rng = np.random.default_rng(0)
    rows = [make_row(rng, "a", sampled=1), make_row(rng, "b", sampled=9)]
    objective = ObjectiveConfig(correction=Correction.NONE)
    for budget in (1, 4096):
        trainer, _ = _trainer(folder, objective, tokens_per_micro_batch=budget)
        (outcome,) = trainer.steps(TrainBatch(groups=(make_group(rows, [1.0, 0.0]),)), 0)
        high, low = outcome.rows[0].advantage, outcome.rows[1].advantage
        assert outcome.metrics.loss == pytest.approx(-(high * 1 + low * 9) / 10, rel=1e-5)


def test_on_policy_rows_have_ratio_one(folder):
    trainer, _ = _trainer(folder)
    (outcome,) = trainer.steps(_on_policy(trainer, _batch(kept=True)), 0)
    assert outcome.mismatch.abs_log_ratio_max < 1e-5
    assert all(np.allclose(row.weights, 1.0, atol=1e-5) for row in outcome.rows)
    assert outcome.stepped


def test_mismatch_is_measured_without_a_correction_and_split_by_age(folder):
    trainer, _ = _trainer(folder, ObjectiveConfig(correction=Correction.NONE))
    batch = _batch()
    for version in range(2):
        list(trainer.steps(batch, version))
    rng = np.random.default_rng(1)
    rows = [
        make_row(rng, "a", version=2),
        make_row(rng, "b", version=1, kv_version=0),
        make_row(rng, "c", version=2, kv_version=1),
    ]
    (outcome,) = trainer.steps(TrainBatch(groups=(make_group(rows, [1.0, 0.0, 0.5]),)), 2)
    assert [(part.age, part.kv_age, part.mismatch.tokens) for part in outcome.slices] == [
        (0, 0, 5),
        (0, 1, 5),
        (1, 2, 5),
    ]
    ratios = np.concatenate([o.trainer_logprobs - r.logprobs for o, r in zip(outcome.rows, rows, strict=True)])
    assert outcome.mismatch.abs_log_ratio_mean == pytest.approx(np.abs(ratios).mean(), rel=1e-5)
    assert outcome.mismatch.popped_share == outcome.mismatch.clipped_share == 0


@pytest.mark.parametrize("steps_on_a_batch", [2, 3])
def test_each_row_is_trained_in_exactly_one_step(folder, steps_on_a_batch):
    clock = StalenessConfig(max_staleness=3)
    trainer, backend = _trainer(folder, steps_on_a_batch=steps_on_a_batch, staleness=clock)
    batch = _batch()
    before, weights = trainer.logprobs([row for group in batch.groups for row in group.rows]), [_copy(backend)]
    outcomes = []
    for outcome in trainer.steps(batch, 0):
        outcomes.append(outcome)
        weights.append(_copy(backend))
    assert [outcome.number for outcome in outcomes] == list(range(1, steps_on_a_batch + 1))
    assert all(not _same(left, right) for left, right in pairwise(weights))
    trained = [(row.trajectory, row.branch) for outcome in outcomes for row in outcome.rows]
    assert sorted(trained) == sorted((row.trajectory, row.branch) for group in batch.groups for row in group.rows)
    homes = {row.trajectory: outcome.number for outcome in outcomes for row in outcome.rows}
    assert all(homes[row.trajectory] == outcome.number for outcome in outcomes for row in outcome.rows)
    # log-probabilities are those before the first step, in every step
    expected = {
        (row.trajectory, row.branch): logprobs
        for row, logprobs in zip([row for group in batch.groups for row in group.rows], before, strict=True)
    }
    for outcome in outcomes:
        for row in outcome.rows:
            np.testing.assert_allclose(row.trainer_logprobs, expected[row.trajectory, row.branch], atol=1e-5)


def test_an_over_age_row_has_no_gradient_and_its_reward_stays_in_the_baseline(folder):
    clock = StalenessConfig(max_staleness=1)
    rng = np.random.default_rng(2)
    rows = [make_row(rng, name, version=version) for name, version in (("a", 2), ("b", 2), ("old", 0))]
    kv_rows = [*rows[:2], replace(rows[2], policy_version=rows[0].policy_version)]  # its context is old
    for members in (rows, kv_rows):
        trainer, backend = _trainer(folder, staleness=clock)
        for version in range(2):
            list(trainer.steps(_batch(), version))
        kept = _copy(backend)
        (outcome,) = trainer.steps(TrainBatch(groups=(make_group(members, [1.0, 0.0, 4.0]),)), 2)
        assert outcome.rows[2].mask_codes.tolist() == [AGE] * 5
        assert np.isnan(outcome.rows[2].trainer_logprobs).all()
        assert outcome.metrics.rows == 2
        assert outcome.metrics.tokens == outcome.mismatch.tokens == 10
        mean, std = 5 / 3, np.std([1.0, 0.0, 4.0], ddof=1)
        assert outcome.rows[0].advantage == pytest.approx((1 - mean) / std, rel=1e-4)
        # the same update as a group whose third member has a reward and no row
        other, twin = _trainer(folder, staleness=clock)
        for version in range(2):
            list(other.steps(_batch(), version))
        assert _same(kept, _copy(twin))
        group = replace(make_group(members, [1.0, 0.0, 4.0]), rows=tuple(members[:2]))
        list(other.steps(TrainBatch(groups=(group,)), 2))
        assert _same(_copy(backend), _copy(twin))


def test_the_bound_is_checked_at_every_step_on_the_batch(folder):
    trainer, _ = _trainer(folder, steps_on_a_batch=2, staleness=StalenessConfig(max_staleness=0))
    first, second = trainer.steps(_batch(), 0)
    assert first.stepped
    assert not second.stepped
    assert "age" in second.why_not
    assert all((row.mask_codes == AGE).all() for row in second.rows)
    assert all(np.isfinite(row.trainer_logprobs).all() for row in second.rows)
    assert trainer.version == 1


def test_truncated_trajectories_are_masked_where_asked(folder):
    rng = np.random.default_rng(2)
    group = make_group([make_row(rng, "a"), make_row(rng, "cut")], [1.0, 0.0], truncated=["cut"])
    for masked in (True, False):
        trainer, _ = _trainer(folder, ObjectiveConfig(mask_truncated=masked))
        (outcome,) = trainer.steps(TrainBatch(groups=(group,)), 0)
        assert (outcome.rows[1].mask_codes == TRUNCATED).all() == masked
        assert outcome.metrics.tokens == (5 if masked else 10)


@pytest.mark.parametrize("batch", ["no groups", "no rows", "all truncated"])
def test_a_batch_without_a_usable_token_is_a_reported_event(folder, batch):
    rng = np.random.default_rng(2)
    rows = [make_row(rng, "a"), make_row(rng, "b")]
    group = make_group(rows, [1.0, 0.0], truncated=["a", "b"])
    groups = {"no groups": (), "no rows": (replace(group, rows=()),), "all truncated": (group,)}[batch]
    trainer, backend = _trainer(folder, ObjectiveConfig(mask_truncated=True))
    list(trainer.steps(_batch(), 0))
    before = _copy(backend)
    (outcome,) = trainer.steps(TrainBatch(groups=groups), 1)
    assert not outcome.stepped
    assert outcome.why_not
    assert trainer.version == 1
    assert outcome.metrics.loss == outcome.metrics.grad_norm == outcome.metrics.entropy == 0.0
    assert _same(before, _copy(backend))
    list(trainer.steps(_batch(), 1))
    assert trainer.version == 2


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("asked", [1, 2, 5])
def test_a_stop_inside_a_step_leaves_everything_as_it_was(folder, dtype, asked):
    options = {"tokens_per_micro_batch": 12, "dtype": dtype}
    trainer, backend = _trainer(folder, **options)
    list(trainer.steps(_batch(), 0))
    before, answers = _copy(backend), iter([False] * asked + [True])
    with pytest.raises(StepStoppedError):
        list(trainer.steps(_batch(1), 1, stop=lambda: next(answers)))
    assert trainer.version == 1
    assert _same(before, _copy(backend))
    list(trainer.steps(_batch(2), 1))
    twin, twin_backend = _trainer(folder, **options)
    list(twin.steps(_batch(), 0))
    list(twin.steps(_batch(2), 1))
    assert _same(_copy(backend), _copy(twin_backend))


def test_steps_taken_before_a_stop_stay_taken(folder):
    trainer, _ = _trainer(folder, steps_on_a_batch=2, staleness=StalenessConfig(max_staleness=2))
    stopped = []
    steps = trainer.steps(_batch(), 0, stop=lambda: bool(stopped))
    assert next(steps).stepped
    stopped.append(True)
    with pytest.raises(StepStoppedError):
        next(steps)
    assert trainer.version == 1


def test_the_kl_pulls_back_to_where_rl_started(folder):
    """Without a reward signal the KL is the only gradient: none at the reference, some away from it."""
    objective = ObjectiveConfig(kl_coefficient=1.0, correction=Correction.NONE)
    trainer, _ = _trainer(folder, objective, staleness=StalenessConfig(max_staleness=9))
    flat = TrainBatch(groups=tuple(replace(g, rewards=dict.fromkeys(g.rewards, 1.0)) for g in _batch().groups))
    (start,) = trainer.steps(_on_policy(trainer, flat), 0)
    assert start.metrics.kl == pytest.approx(0.0, abs=1e-9)
    assert start.metrics.grad_norm == pytest.approx(0.0, abs=1e-6)
    for version in range(1, 4):
        list(trainer.steps(_on_policy(trainer, _batch()), version))
    (away,) = trainer.steps(_on_policy(trainer, flat), 4)
    assert away.metrics.kl > 1e-6
    assert away.metrics.grad_norm > 1e-3
    with pytest.raises(RuntimeError, match="reference"):  # without a KL none is kept
        _trainer(folder)[1].reference_logprobs(PackedRows.of_rows(list(flat.groups[0].rows)))


def test_what_was_rewarded_becomes_likelier(folder):
    """A bandit of one token: after a prompt, the reward is 1 for token 7."""
    rng = np.random.default_rng(0)
    trainer, _ = _trainer(folder, ObjectiveConfig(), lr=3e-3, steps=40)
    template = make_row(rng, prompt=3, sampled=1)
    arms = [
        replace(template, token_ids=np.array([*template.token_ids[:-1], token], np.int32)) for token in range(VOCAB)
    ]

    def probabilities():
        return np.exp(np.concatenate(trainer.logprobs(arms))).astype(np.float64)

    start = probabilities()[7]
    for version in range(40):
        policy = probabilities()
        tokens = rng.choice(VOCAB, size=16, p=policy / policy.sum())
        versions = np.full(1, version, np.int32)
        rows = [
            replace(
                arms[token],
                trajectory=f"t{member}",
                logprobs=np.log(policy[[token]]).astype(np.float32),
                policy_version=versions,
                kv_version=versions,
            )
            for member, token in enumerate(tokens)
        ]
        group = make_group(rows, [float(token == 7) for token in tokens])
        (outcome,) = trainer.steps(TrainBatch(groups=(group,)), version)
        assert outcome.mismatch.abs_log_ratio_max < 1e-4
    assert probabilities()[7] > max(0.5, 3 * start)


def test_a_non_finite_gradient_is_reported_and_not_applied(folder):
    trainer, backend = _trainer(folder)
    for tensor in backend.weights().values():
        tensor.data.fill_(float("inf"))
    (outcome,) = trainer.steps(_batch(), 0)
    assert not outcome.stepped
    assert outcome.why_not
    assert outcome.metrics.non_finite_tokens == sum(len(row.positions) for g in _batch().groups for row in g.rows)
    assert trainer.version == 0


def test_contradictions_are_refused(folder):
    trainer, _ = _trainer(folder)
    with pytest.raises(BooksError, match="version 3"):
        next(trainer.steps(_batch(), 3))
    with pytest.raises(RecordError, match="tokens of version 1"):
        next(trainer.steps(_batch(version=1), 0))
    group = _batch().groups[0]
    stray = replace(group, rewards={k: v for k, v in group.rewards.items() if k != "g0/t1"})
    with pytest.raises(RecordError, match="no reward"):
        next(trainer.steps(TrainBatch(groups=(stray,)), 0))


def test_resuming_in_the_middle_of_rl_is_bit_for_bit(folder, tmp_path):
    objective = ObjectiveConfig(kl_coefficient=0.1)
    straight, backend = _trainer(folder, objective, dtype=Dtype.BFLOAT16)
    for version in range(4):
        list(straight.steps(_batch(version), version))
    first, first_backend = _trainer(folder, objective, dtype=Dtype.BFLOAT16)
    for version in range(2):
        list(first.steps(_batch(version), version))
    first_backend.save(tmp_path)
    resumed, resumed_backend = _trainer(folder, objective, dtype=Dtype.BFLOAT16, begin=False)
    resumed_backend.load(tmp_path)
    for version in range(2, 4):
        list(resumed.steps(_batch(version), version))
    assert _same(_copy(backend), _copy(resumed_backend))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_token_over_either_bound_ever_has_a_gradient(folder, data):
    """Random versions: a row is in the gradient iff all of it is within both bounds."""
    bound, kv_bound = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    trainer, _ = _trainer(folder, staleness=StalenessConfig(max_staleness=bound, max_kv_staleness=kv_bound))
    for version in range(3):
        list(trainer.steps(_batch(version=version), version))
    rng = np.random.default_rng(0)
    rows = []
    for member in range(4):
        row = make_row(rng, f"t{member}", sampled=3)
        versions = np.array(data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3)), np.int32)
        kv = np.array([data.draw(st.integers(0, int(v))) for v in versions], np.int32)
        rows.append(replace(row, policy_version=versions, kv_version=kv))
    (outcome,) = trainer.steps(TrainBatch(groups=(make_group(rows, [1.0, 0.0, 0.5, 0.2]),)), 3)
    for row, result in zip(rows, outcome.rows, strict=True):
        within = (3 - row.policy_version.min() <= bound) and (3 - row.kv_version.min() <= kv_bound)
        assert (result.mask_codes == AGE).all() != within
