"""Routes recorded in one forward and replayed in another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_models import MOE, packed, random_ids, random_model, split

from fathom.core.errors import ConfigError, RecordError
from fathom.model.language_model import LanguageModel
from fathom.model.routing import ExpertShape, GateRule

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=MOE)
def family(request):
    return request.param


def moe(family="qwen3_moe", dtype=torch.float32, **entries):
    plain = random_model(family, **entries)
    if family == "deepseek_v3":
        generator = torch.Generator().manual_seed(1)
        for layer in plain.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(16, generator=generator) * 0.3)
    return LanguageModel(plain.to(dtype))


def record(model, rows, margins=False):
    """(hidden states, routing) of a free forward."""
    ids, positions, plan = packed(rows)
    routing = model.routing(len(ids), margins=margins)
    return model.hidden(ids, positions, plan, routing), routing


def replay(model, rows, forced):
    ids, positions, plan = packed(rows)
    routing = model.routing(len(ids), forced=forced)
    return model.hidden(ids, positions, plan, routing), routing


def gradients(model):
    return {name: tensor.grad.clone() for name, tensor in model.weights().items() if tensor.grad is not None}


def others(model, chosen, seed=3):
    """Other complete routes than those chosen."""
    generator = np.random.default_rng(seed)
    shape = model.shape.experts
    picks = [generator.permutation(shape.experts)[: shape.per_token] for _ in range(chosen.shape[0] * chosen.shape[1])]
    return np.array(picks).reshape(chosen.shape).astype(shape.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replaying_a_models_own_routes_changes_no_bit(family, dtype):
    model, rows = moe(family, dtype), random_ids(5, 9, 9, 2)
    ids, positions, plan = packed(rows)
    plain = model.hidden(ids, positions, plan)
    free, routing = record(model, rows)
    forced, again = replay(model, rows, routing.chosen)
    assert torch.equal(free, plain)
    assert torch.equal(forced, plain)
    assert np.array_equal(again.chosen, routing.chosen)
    shape = model.shape.experts
    assert routing.chosen.dtype == np.uint8
    assert routing.chosen.shape == (25, shape.layers, shape.per_token)
    assert not shape.fault(routing.chosen, 25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_replay_are_those_of_the_free_forward(family, dtype):
    rows = random_ids(5, 9)
    model = moe(family, dtype)
    free, routing = record(model, rows)
    free.float().square().sum().backward()
    expected = gradients(model)
    for tensor in model.weights().values():
        tensor.grad = None
    replay(model, rows, routing.chosen)[0].float().square().sum().backward()
    assert any(".mlp.gate.weight" in name for name in expected)
    again = gradients(model)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_exactly_the_recorded_experts_compute_and_their_gates_have_gradients(family):
    model, rows = moe(family), random_ids(3, 4)
    free, routing = record(model, rows)
    given = others(model, routing.chosen)
    forced, _ = replay(model, rows, given)
    assert not torch.allclose(forced, free, atol=1e-3)
    forced.square().sum().backward()
    weights = model.weights()
    gates = sorted(name for name in weights if name.endswith("mlp.gate.weight"))
    for place, name in enumerate(gates):
        assert weights[name].grad.abs().sum() > 0
        # Experts without a token have no gradient; all recorded ones have.
        busy = weights[name.replace("gate.weight", "experts.down_proj")].grad.flatten(1).abs().sum(dim=1) > 0
        assert set(torch.nonzero(busy).flatten().tolist()) == set(np.unique(given[:, place]).tolist())


def test_an_order_of_the_same_experts_changes_nothing_but_rounding(family):
    model, rows = moe(family), random_ids(6)
    free, routing = record(model, rows)
    forced, _ = replay(model, rows, np.ascontiguousarray(routing.chosen[:, :, ::-1]))
    torch.testing.assert_close(forced, free, atol=1e-5, rtol=0)


@torch.no_grad()
def test_packed_routes_are_those_of_each_row_alone(family):
    model, rows = moe(family), random_ids(5, 3, 7)
    _, routing = record(model, rows)
    given = others(model, routing.chosen)
    hidden, _ = replay(model, rows, given)
    for row, routes, part, chosen in zip(
        rows,
        split(torch.from_numpy(given), rows),
        split(hidden, rows),
        split(torch.from_numpy(routing.chosen), rows),
        strict=True,
    ):
        torch.testing.assert_close(replay(model, [row], routes.numpy())[0], part, atol=1e-5, rtol=0)
        assert np.array_equal(record(model, [row])[1].chosen, chosen.numpy())


def checkpointed(family):
    plain = random_model(family)
    plain.activation_checkpointing_enable()
    model = LanguageModel(plain)
    plain.train()
    return model


def test_a_recomputation_replays_the_routes_of_its_own_forward(family):
    """Two forwards, then their backwards: each must be computed again with its own routes."""
    rows = random_ids(5, 6)
    reference, model = moe(family), checkpointed(family)
    reference.use(model.weights())
    _, routing = record(reference, rows)
    given = [others(reference, routing.chosen, seed) for seed in (3, 4)]
    for subject in (reference, model):
        first, second = (replay(subject, rows, routes)[0] for routes in given)
        first.square().sum().backward()
        second.sin().sum().backward()
    expected, mine = gradients(reference), gradients(model)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_a_recomputation_records_what_its_forward_recorded(family):
    rows, model = random_ids(5, 6), checkpointed(family)
    hidden, routing = record(model, rows)
    before = routing.chosen.copy()
    record(model, random_ids(4, 7, seed=9))
    routing.chosen[:] = 0  # a view: what comes back was recorded in the backward
    hidden.sum().backward()
    assert np.array_equal(routing.chosen, before)


def test_the_gates_are_those_of_the_worked_example():
    """Recorded experts 0 and 2 where the router would have taken 0 and 1."""
    logits, ids = torch.tensor([[2.0, 1.0, 0.5, -1.0]]), torch.tensor([[0, 2]])
    rule = {"epsilon": 0.0, "scale": 1.0, "narrow": False, "groups": 1, "bias": None}
    softmax = GateRule(sigmoid=False, normalise=True, **rule)
    plain = GateRule(sigmoid=False, normalise=False, **rule)
    sigmoid = GateRule(sigmoid=True, normalise=True, **(rule | {"scale": 2.5, "epsilon": 1e-20}))

    def close_to(left, right):
        torch.testing.assert_close(left, torch.tensor(right), atol=1e-6, rtol=0)

    close_to(softmax.gates(logits, ids), [[0.817574476194, 0.182425523806]])
    close_to(plain.gates(logits, ids), [[0.609460037599, 0.135988915794]])
    close_to(sigmoid.gates(logits, ids), [[1.46481510506, 1.03518489494]])
    slope = 0.14914645207
    jacobian = torch.autograd.functional.jacobian(lambda given: softmax.gates(given, ids)[0], logits)
    close_to(jacobian[:, 0], [[slope, 0.0, -slope, 0.0], [-slope, 0.0, slope, 0.0]])
    jacobian = torch.autograd.functional.jacobian(lambda given: plain.gates(given, ids)[0], logits)
    close_to(
        jacobian[:, 0],
        [
            [0.238018500169, -0.136645705218, -0.0828798097325, -0.0184929852187],
            [-0.0828798097325, -0.0304897780888, 0.117495930575, -0.00412634275347],
        ],
    )


def test_margins_say_by_how_much_a_choice_was_made():
    rule = GateRule(sigmoid=False, normalise=True, epsilon=0.0, scale=1.0, narrow=False, groups=1, bias=None)
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
    torch.testing.assert_close(rule.margin(logits, torch.tensor([[0, 1], [3, 2]])), torch.tensor([0.15, 0.1]))
    every = torch.tensor([[0, 1, 2, 3]] * 2)
    assert rule.margin(logits, every).tolist() == [float("inf")] * 2


@torch.no_grad()
def test_margins_are_of_the_choice_really_made(family):
    _, routing = record(moe(family), random_ids(9, 8), margins=True)
    assert routing.margins.shape == routing.chosen.shape[:2]
    assert (routing.margins > 0).all()


def test_ids_are_as_narrow_as_they_can_be():
    assert ExpertShape(layers=1, experts=256, per_token=1).dtype == np.uint8
    assert ExpertShape(layers=1, experts=257, per_token=1).dtype == np.uint16


@torch.no_grad()
def test_more_than_256_experts_are_replayed_too():
    model, rows = moe(num_experts=300, moe_intermediate_size=4), random_ids(7)
    free, routing = record(model, rows)
    assert routing.chosen.dtype == np.uint16
    assert routing.chosen.max() > 255
    assert torch.equal(replay(model, rows, routing.chosen)[0], free)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda routes: routes[:-1], r"uint8 \[6, 2, 4\], not uint8 \[7, 2, 4\]"),
        (lambda routes: routes[:, :1], r"uint8 \[7, 1, 4\]"),
        (lambda routes: routes.astype(np.uint16), "routes are uint16"),
        (lambda routes: routes + np.uint8(16), "of 16"),
        (lambda routes: np.zeros_like(routes), "an expert twice"),
    ],
)
def test_incomplete_routes_are_refused(spoil, message):
    model, rows = moe(), random_ids(7)
    _, routing = record(model, rows)
    with pytest.raises(RecordError, match=message):
        model.routing(7, forced=spoil(routing.chosen))


def test_a_dense_model_has_no_routes():
    model = LanguageModel(random_model())
    assert model.shape.experts is None
    with pytest.raises(ConfigError, match="dense model"):
        model.routing(3)
