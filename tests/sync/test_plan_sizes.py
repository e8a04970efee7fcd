"""Parameters and bytes that a plan counts."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fathom.core.errors import ConfigError
from fathom.sync.chain.codec import Encoder
from fathom.sync.chain.links import Encoding
from fathom.sync.plan.density import change_probability, delta_ratio, density
from fathom.sync.plan.layout import EngineLayout, Topology, TrainerLayout
from fathom.sync.plan.model_size import ModelSize, Served
from fathom.sync.plan.published import published_rows
from fathom.sync.plan.traffic import Traffic
from fathom.sync.transports.p2p.plan import assign

GIB = 1 << 30


def topology(trainer: TrainerLayout, engines: EngineLayout, *, one_host: bool = False) -> Topology:
    return Topology(trainer=trainer, engines=engines, one_host=one_host)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 30.53),
        ("GLM-4.5-Air", 106.9),
        ("Qwen3-235B-A22B", 235.1),
        ("GLM-5", 743.9),
        ("Kimi-K2", 1026.4),
        ("Moonlight-16B-A3B", 15.96),
    ],
)
def test_configs_mean_as_many_parameters_as_the_models_have(name: str, billions: float) -> None:
    (row,) = [row for row in published_rows() if row.model.name == name]
    assert row.model.params / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_folder_with_weights_is_counted_exactly(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (11, 4),
        "model.layers.0.mlp.gate.weight": (3, 4),
        **{f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight": (5, 4) for layer in (0, 2) for e in range(3)},
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    model = ModelSize.of_path(tmp_path)
    assert model.other_params == 11 * 4 + 3 * 4
    assert (model.expert_params, model.experts, model.expert_layers) == (2 * 3 * 20, 3, 2)


def test_fused_experts_are_counted_too(tmp_path: Path) -> None:
    save_file({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((6, 4, 5), np.float32)}, tmp_path / "a.safetensors")
    model = ModelSize.of_path(tmp_path)
    assert (model.expert_params, model.other_params, model.experts, model.expert_layers) == (120, 0, 6, 1)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    facts = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "vocab_size": 10,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    attention, feed_forward, norms = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 16, 2 * 8
    assert ModelSize.of_path(tmp_path / "config.json").params == 80 + 2 * (attention + feed_forward + norms) + 8


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither .* give --params"),
        ({"config.json": "{}"}, "does not say how large .* --params"),
        ({"config.json": "[1]"}, "does not say how large"),
        ({"model.safetensors": "xx"}, "is its download complete"),
    ],
)
def test_folders_that_say_nothing_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelSize.of_path(tmp_path)


def assigned(sources: int, engines: int, ranks: int) -> tuple[int, int]:
    """(most layouts, most writes of one layout) of a source, by the plan that p2p itself follows."""
    held: dict[int, Counter[int]] = defaultdict(Counter)
    for (_, rank), source in assign(sources, engines, ranks).items():
        held[source][rank] += 1
    return max(map(len, held.values())), max(count for counts in held.values() for count in counts.values())


@given(sources=st.integers(1, 24), engines=st.integers(1, 6), ranks=st.integers(1, 12))
def test_the_busiest_source_is_as_busy_as_the_rule_makes_it(sources: int, engines: int, ranks: int) -> None:
    layout = topology(TrainerLayout(gpus=sources), EngineLayout(gpus=engines * ranks, tp=ranks))
    traffic = Traffic.of(ModelSize.of_params(1e6), Served.BFLOAT16, layout)
    assert (traffic.layouts_per_source, traffic.writes_per_layout) == assigned(sources, engines, ranks)


@given(ep=st.sampled_from([1, 2, 4, 8]), dp=st.sampled_from([1, 2, 4, 8]), engines=st.integers(1, 4))
def test_ranks_of_an_engine_hold_the_model_once_and_dp_copies_of_the_rest(ep: int, dp: int, engines: int) -> None:
    model = ModelSize(name="m", other_params=800, expert_params=6400, experts=8, expert_layers=2)
    layout = topology(TrainerLayout(gpus=8), EngineLayout(gpus=8 * engines, tp=8, ep=ep, dp=dp))
    traffic = Traffic.of(model, Served.BFLOAT16, layout)
    assert traffic.rank_bytes * 8 == pytest.approx(2 * (6400 + 800 * dp))
    assert traffic.full_bytes == 2 * 7200
    assert traffic.host_bytes <= traffic.full_bytes


def test_buckets_hold_whole_matrices_of_all_expert_ranks() -> None:
    """One matrix of all ranks is larger than a bucket: it is a bucket all the same."""
    model = ModelSize(name="m", other_params=1, expert_params=3 * GIB * 4, experts=4, expert_layers=1)
    one = Traffic.of(model, Served.BFLOAT16, topology(TrainerLayout(gpus=4, ep=4), EngineLayout(gpus=4, tp=4, ep=4)))
    assert one.buckets == 1 + 2  # the rest; one round of gate and up, one of down
    apart = Traffic.of(model, Served.BFLOAT16, topology(TrainerLayout(gpus=4), EngineLayout(gpus=4, tp=4, ep=4)))
    assert apart.buckets == 1 + 4 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainerLayout(gpus=8, tp=3), "TP 3 x PP 1 x CP 1 = 3 does not divide 8 ranks; .* use 6 or 9"),
        (lambda: TrainerLayout(gpus=8, pp=4, ep=4), "EP 4 within one of 4 stages"),
        (lambda: TrainerLayout(gpus=0), "gpus = 0; give a number from 1"),
        (lambda: EngineLayout(gpus=8, tp=16), "TP 16 = 16 does not divide 8 ranks"),
        (lambda: EngineLayout(gpus=8, tp=8, ep=3), "EP 3 = 3 does not divide 8 ranks"),
        (lambda: EngineLayout(gpus=8, tp=8, dp=-1), "dp = -1"),
        (lambda: ModelSize.of_params(-1), "e.g. --params 30e9"),
        (lambda: ModelSize.of_params(float("nan")), "e.g. --params 30e9"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("weight", "probability"), [(1.0, 0.000128), (0.02, 0.008192), (2e-3, 0.065536), (3e-4, 0.524288), (1e-4, 1.0)]
)
def test_a_change_is_seen_when_it_passes_the_gap(weight: float, probability: float) -> None:
    assert change_probability(1e-6, weight, Served.BFLOAT16) == pytest.approx(probability)


@given(low=st.floats(1e-9, 1e-3), factor=st.floats(1, 10), served=st.sampled_from(list(Served)))
def test_more_changes_at_larger_rates_and_in_finer_types(low: float, factor: float, served: Served) -> None:
    assert 0 < density(low, served) <= density(low * factor, served) <= 1
    assert density(low, Served.FP8) <= density(low, Served.BFLOAT16) <= density(low, Served.FLOAT32)


def test_density_agrees_with_random_weights() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 200_000)
    mean = np.mean([change_probability(1e-6, float(weight), Served.BFLOAT16) for weight in weights])
    assert density(1e-6, Served.BFLOAT16) == pytest.approx(float(mean), rel=0.02)


@given(st.floats(0, 0.5), st.floats(1, 2), st.sampled_from(list(Served)))
def test_a_delta_grows_with_what_changed_and_is_never_larger_than_the_version(
    changed: float, factor: float, served: Served
) -> None:
    assert 0 < delta_ratio(changed, served) <= delta_ratio(min(0.5, changed * factor), served) <= 1


def test_a_delta_of_a_short_type_is_about_what_the_codec_makes_of_it() -> None:
    """Elements that move to a neighbour, up or down, at random places: a little less than real weights take."""
    generator = np.random.default_rng(0)
    old = generator.integers(0x3C00, 0x3D00, 400_000).astype(np.uint16)
    for changed in (0.005, 0.02, 0.1):
        steps = np.where(generator.random(old.size) < 0.5, 1, -1)
        new = np.where(generator.random(old.size) < changed, old + steps, old).astype(np.uint16)
        encoded = b"".join(Encoder(level=1).encode(Encoding.INDEX, old, new))
        assert delta_ratio(changed, Served.BFLOAT16) == pytest.approx(len(encoded) / old.nbytes, rel=0.4)
