"""Steps on rows that carry the engine's expert routes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_rows import VOCAB, make_group, make_row, save_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fathom.config.families import Correction, Dtype
from fathom.config.objective import ObjectiveConfig
from fathom.config.trainer import OptimizerConfig, StalenessConfig, TrainerConfig
from fathom.core.errors import ConfigError, RecordError
from fathom.core.records.step import MaskReason, TrainBatch
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.trainer.backends.packed import PackedRows
from fathom.trainer.backends.torch_backend import TorchBackend
from fathom.trainer.loop.trainer import Trainer

LAYERS, EXPERTS, PER_TOKEN = 3, 8, 2
ROUTES = list(MaskReason).index(MaskReason.ROUTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def trainer_of(folder, **options):
    options = {"steps": 20, "groups_per_step": 1, "optimizer": OptimizerConfig(lr=1e-2)} | options
    config = TrainerConfig(**options)
    backend = TorchBackend(folder, config)
    trainer = Trainer(backend, config, ObjectiveConfig(correction=Correction.NONE), StalenessConfig())
    trainer.begin()
    return trainer, backend


def random_routes(rng, tokens):
    picks = [rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(tokens * LAYERS)]
    return np.array(picks, np.uint8).reshape(tokens, LAYERS, PER_TOKEN)


def rows_with(routes_of, seed=0):
    rng = np.random.default_rng(seed)
    rows = [make_row(rng, f"t{i}", prompt=3 + i, sampled=4 + i) for i in range(3)]
    return [with_routes(row, routes_of(row, rng)) for row in rows]


def with_routes(row, routes):
    mixed = np.zeros(len(row.positions), bool) if routes is not None else None
    return replace(row, routes=routes, mixed_routes=mixed)


def random_rows(seed=0):
    return rows_with(lambda row, rng: random_routes(rng, len(row.token_ids) - 1), seed)


def live_rows(folder, dtype):
    """Rows with the routes that the model itself chooses."""
    model = LanguageModel.load(folder, dtype, "cpu")

    def routes_of(row, _):
        ids = torch.from_numpy(row.token_ids[:-1].astype(np.int64))
        routing = model.routing(len(ids))
        model.hidden(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), routing)
        return routing.chosen

    return rows_with(routes_of)


def batch_of(rows):
    return TrainBatch(groups=(make_group(rows, [1.0, 0.0, 0.25]),))


def step(trainer, rows):
    (outcome,) = trainer.steps(batch_of(rows), trainer.version)
    return outcome


def copy(backend):
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


@pytest.mark.parametrize("dtype", Dtype)
def test_replaying_the_trainers_own_routes_is_the_plain_step(folder, dtype):
    rows = live_rows(folder, torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16)
    results = []
    for replay in (False, True):
        trainer, backend = trainer_of(folder, dtype=dtype, replay_routes=replay)
        results.append((step(trainer, rows), copy(backend)))
    (free, free_weights), (forced, forced_weights) = results
    assert all(torch.equal(free_weights[name], forced_weights[name]) for name in free_weights)
    for left, right in zip(free.rows, forced.rows, strict=True):
        assert np.array_equal(left.trainer_logprobs, right.trainer_logprobs)
    assert (free.routes.forced_share, forced.routes.forced_share) == (0.0, 1.0)
    assert free.routes.agreement == forced.routes.agreement == 1.0
    assert free.routes.overlap == 1.0
    assert all(not row.route_changes.any() for row in free.rows)


def test_log_probabilities_before_the_step_and_in_it_use_the_same_routes(folder):
    """Two steps on a batch need the pass before the first one; its ratios are those of one and the same forward."""
    rows = random_rows()
    alone, _ = trainer_of(folder, replay_routes=True)
    shared, _ = trainer_of(folder, replay_routes=True, steps_on_a_batch=2)
    expected = {row.trajectory: row.trainer_logprobs for row in step(alone, rows).rows}
    outcomes = list(shared.steps(batch_of(rows), 0))
    got = {row.trajectory: row.trainer_logprobs for outcome in outcomes for row in outcome.rows}
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5)
    free, _ = trainer_of(folder)
    live = {row.trajectory: row.trainer_logprobs for row in step(free, rows).rows}
    assert max(np.abs(live[name] - got[name]).max() for name in got) > 1e-2


def test_cutting_a_batch_changes_neither_the_step_nor_what_is_measured(folder):
    rows = random_rows()
    outcomes = [
        step(trainer_of(folder, replay_routes=True, tokens_per_micro_batch=budget)[0], rows) for budget in (4096, 1)
    ]
    left, right = outcomes[0].routes, outcomes[1].routes
    assert left.tokens == right.tokens == sum(row.positions[-1] for row in rows)
    assert left.agreement == pytest.approx(right.agreement)
    assert left.layer_agreement == pytest.approx(right.layer_agreement)
    assert left.margin_mean == pytest.approx(right.margin_mean, rel=1e-4)
    for one, other in zip(outcomes[0].rows, outcomes[1].rows, strict=True):
        assert np.array_equal(one.route_changes, other.route_changes)
        np.testing.assert_allclose(one.trainer_logprobs, other.trainer_logprobs, atol=1e-5)


def test_what_differs_is_counted_by_token_layer_and_expert(folder):
    """One expert of one layer is exchanged for one token of each row, before its first token with loss."""

    def spoil(row):
        routes, at = row.routes.copy(), row.positions[0] - 1
        free = np.setdiff1d(np.arange(EXPERTS), routes[at, LAYERS - 1])
        routes[at, LAYERS - 1, 0] = free[0]
        return with_routes(row, routes)

    rows = [spoil(row) for row in live_rows(folder, torch.float32)]
    outcome = step(trainer_of(folder)[0], rows)
    tokens = sum(int(row.positions[-1]) for row in rows)
    assert outcome.routes.tokens == tokens
    assert outcome.routes.agreement == pytest.approx(1 - 3 / tokens)
    assert outcome.routes.layer_agreement == pytest.approx((1.0, 1.0, 1 - 3 / tokens))
    assert outcome.routes.overlap == pytest.approx(1 - 3 / (tokens * LAYERS * PER_TOKEN))
    assert outcome.routes.size_bytes == sum((len(row.token_ids) - 1) * LAYERS * PER_TOKEN for row in rows)
    assert outcome.routes.margin_p01 > 0
    for row in outcome.rows:
        assert row.route_changes.tolist() == [1] + [0] * (len(row.positions) - 1)


def test_the_mixed_share_is_that_of_the_tokens_with_loss(folder):
    rows = random_rows()
    rows[0] = replace(rows[0], mixed_routes=np.array([False, False, True, True]))
    outcome = step(trainer_of(folder)[0], rows)
    assert outcome.routes.mixed_share == pytest.approx(2 / sum(len(row.positions) for row in rows))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda routes: None,
        lambda routes: routes[:-1],
        lambda routes: routes[:, :-1],
        lambda routes: np.full_like(routes, EXPERTS),
        lambda routes: np.zeros_like(routes),
        lambda routes: routes.astype(np.uint16),
    ],
    ids=["none", "short", "layers", "unknown", "twice", "wide"],
)
def test_a_row_without_complete_routes_is_refused_with_its_reason(folder, spoil):
    rows = random_rows()
    spoilt = [rows[0], with_routes(rows[1], spoil(rows[1].routes)), rows[2]]
    trainer, backend = trainer_of(folder, replay_routes=True)
    outcome = step(trainer, spoilt)
    assert outcome.stepped
    first, refused, last = outcome.rows
    assert set(refused.mask_codes.tolist()) == {ROUTES}
    assert np.isnan(refused.trainer_logprobs).all()
    assert refused.route_changes is None
    assert set(first.mask_codes.tolist() + last.mask_codes.tolist()) == {-1}
    assert outcome.metrics.rows == 2
    assert outcome.metrics.tokens == sum(len(row.positions) for row in (rows[0], rows[2]))

    # The rest is trained as if it had not been there; its reward keeps its place in the baseline.
    only, plain = trainer_of(folder, replay_routes=True)
    group = replace(batch_of(spoilt).groups[0], rows=(rows[0], rows[2]))
    (_,) = only.steps(TrainBatch(groups=(group,)), 0)
    assert all(torch.equal(plain.weights()[name], tensor) for name, tensor in backend.weights().items())


def test_a_step_whose_rows_all_lack_routes_changes_nothing(folder):
    trainer, backend = trainer_of(folder, replay_routes=True)
    before = copy(backend)
    outcome = step(trainer, rows_with(lambda row, rng: None))
    assert not outcome.stepped
    assert outcome.why_not == "no token is in the gradient; masked: 15 routes"
    assert outcome.routes is None
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights().items())


def test_what_an_engine_that_scores_is_compared_with_routes_freely(folder):
    rows = random_rows()
    replaying, _ = trainer_of(folder, replay_routes=True)
    free, _ = trainer_of(folder)
    for left, right in zip(replaying.logprobs(rows), free.logprobs(rows), strict=True):
        assert np.array_equal(left, right)


def test_a_dense_model_cannot_replay(tmp_path):
    with pytest.raises(ConfigError, match="needs a model with experts"):
        trainer_of(save_model(tmp_path), replay_routes=True)


def test_rows_without_routes_never_reach_a_replaying_forward():
    with pytest.raises(RecordError, match="a row has none"):
        PackedRows.of_rows(rows_with(lambda row, rng: None), forced=True)
