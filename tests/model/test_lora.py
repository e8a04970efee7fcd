"""Adapters: the update's formula, where it is applied, what it leaves alone, and the format that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_models import CONFIGS, MOE, packed, random_ids, random_model, split
from torch import nn
from torch.nn.functional import linear

from fathom.core.adapter import AdapterForm, AdapterIdentity, why_another
from fathom.core.errors import ConfigError
from fathom.model.language_model import LanguageModel
from fathom.model.lora.low_rank import LowRank
from fathom.model.lora.merging import MergedWeights
from fathom.model.lora.peft_config import PeftConfig, read_config, why_other_form
from fathom.model.lora.peft_folder import read_tensors, write_adapter

torch.set_num_threads(1)
VECTORS = json.loads((Path(__file__).parent / "lora_vectors.json").read_text())
ROWS = random_ids(9, 4, 7)


def form_of(*targets, rank=3, alpha=7.0, rslora=False):
    return AdapterForm(name="x", rank=rank, alpha=alpha, rslora=rslora, targets=targets)


def adapted(family="llama", *targets, dtype=torch.float32, noise=0.2, **form):
    model = LanguageModel(random_model(family).to(dtype))
    model.adapt(form_of(*targets, **form), seed=1)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.weights().items():
        if name.endswith("lora_B"):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * noise)
    return model


def logits_of(model, rows=ROWS):
    with torch.no_grad():
        return model.logits(model.hidden(*packed(rows)))


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_the_worked_example(kind):
    given, wanted = VECTORS["forward"]["inputs"], VECTORS["forward"]["expected"]
    form = form_of(rank=given["rank"], alpha=given["alpha"], rslora=kind == "rslora")
    assert form.scale == pytest.approx(wanted["scaling"][kind], rel=1e-9)
    base, a, b = (torch.tensor(given[name], dtype=torch.float64) for name in ("W0_bf16", "A", "B"))
    x = torch.tensor(given["x"], dtype=torch.float64)
    update = LowRank(a=nn.Parameter(a), b=nn.Parameter(b), scale=form.scale)
    found = linear(x, base) + update.update(x)
    assert torch.allclose(found, torch.tensor(wanted["y"][kind], dtype=torch.float64), atol=1e-12, rtol=0)
    if kind == "lora":
        exact = base + update.exact(a, b)
        merged = exact.to(torch.bfloat16).double()
        error = float((merged - exact).abs().max())
        assert error == pytest.approx(wanted["max_abs_merge_error"], rel=1e-6)
        assert torch.allclose(
            merged @ x, torch.tensor(wanted["merged_bf16_y"], dtype=torch.float64), atol=1e-12, rtol=0
        )


def test_the_worked_size():
    given, wanted = VECTORS["size"]["inputs"], VECTORS["size"]["expected"]
    base = given["glm5.2_total_params"] * torch.bfloat16.itemsize
    adapter = given["adapter_MB"] * 1e6
    assert base / 1e9 == wanted["base_bf16_GB"]
    assert adapter / torch.bfloat16.itemsize == wanted["adapter_params_if_bf16"]
    assert 100 * adapter / base == pytest.approx(wanted["ratio_percent"], rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_fresh_adapter_changes_no_bit(family, dtype):
    model = LanguageModel(random_model(family).to(dtype))
    before = logits_of(model)
    model.adapt(form_of(), seed=1)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("family", CONFIGS)
def test_it_computes_the_sum_with_the_scale_once(family):
    """Against the whole model with W + scale B A written out, by matrices of its own."""
    model = adapted(family)
    base = {name: tensor.detach().clone() for name, tensor in model.base_weights().items()}
    whole, parts = dict(base), model.weights()
    for name in {each.rpartition(".")[0] for each in parts}:
        a, b = parts[f"{name}.lora_A"].detach().double(), parts[f"{name}.lora_B"].detach().double()
        target = name if name in whole else f"{name}.weight"
        whole[target] = (whole[target].double() + 7.0 / 3 * (b @ a)).float()
    plain = LanguageModel(random_model(family))
    untouched = logits_of(plain)
    plain.use(whole)
    assert torch.allclose(logits_of(model), logits_of(plain), atol=5e-5)
    assert not torch.allclose(untouched, logits_of(plain), atol=1e-2)
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.base_weights().items())


@pytest.mark.parametrize("family", ["qwen3", *MOE])
def test_the_adapter_alone_has_gradients(family):
    model = adapted(family)
    model.logits(model.hidden(*packed(ROWS))).logsumexp(1).sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in model.weights().values())
    assert all(tensor.grad is None for tensor in model.base_weights().values())


def test_load_evict_load_again_changes_nothing():
    model = adapted("qwen3_moe")
    first = {name: tensor.detach().clone() for name, tensor in model.weights().items()}
    none = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    kept = {name: tensor.clone() for name, tensor in first.items()}
    wanted, plain = logits_of(model), logits_of(LanguageModel(random_model("qwen3_moe")))
    for _ in range(2):
        model.use(none)
        assert torch.equal(logits_of(model), plain)
        model.use(first)
        assert torch.equal(logits_of(model), wanted)
    assert all(torch.equal(first[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_any_rank_does_with_experts(rank):
    model = adapted("mixtral", "experts.down_proj", "experts.gate_up_proj", rank=rank)
    whole, _ = MergedWeights(model).make()
    plain = LanguageModel(random_model("mixtral"))
    plain.use(whole)
    assert torch.allclose(logits_of(model), logits_of(plain), atol=5e-5)


def test_targets_are_whole_words():
    model = LanguageModel(random_model("qwen3_moe"))
    form = model.adapt(form_of("q_proj", "self_attn.o_proj"), seed=0)
    assert form.targets == ("q_proj", "self_attn.o_proj")
    assert {name.split(".")[-2] for name in model.weights()} == {"q_proj", "o_proj"}


@pytest.mark.parametrize("target", ["gate", "proj", "lm_head", "embed_tokens", "qproj", "experts", "down_proj"])
def test_a_target_without_a_match_is_refused(target):
    with pytest.raises(ConfigError, match=rf"names {target}, .*q_proj"):
        LanguageModel(random_model("qwen3_moe")).adapt(form_of("q_proj", target), seed=0)


def test_a_model_has_one_adapter():
    model = adapted()
    with pytest.raises(ConfigError, match="already"):
        model.adapt(form_of(), seed=0)


def test_the_seed_fixes_it():
    first, again = adapted(noise=0.0).weights(), adapted(noise=0.0).weights()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert all(bool(tensor.any()) is name.endswith("lora_A") for name, tensor in first.items())


def test_merging_says_what_it_loses():
    model = adapted("llama", dtype=torch.bfloat16, noise=1e-3)
    whole, rounding = MergedWeights(model).make()
    base = model.base_weights()
    assert whole.keys() == base.keys()
    assert 0 < rounding.unchanged < rounding.updated
    assert 0 < rounding.max_abs < 2**-8
    plain = LanguageModel(random_model().to(torch.bfloat16))
    plain.use(whole)
    assert not torch.equal(logits_of(plain), logits_of(model))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
@pytest.mark.filterwarnings("ignore")
def test_peft_reads_what_is_written_as_the_same_function(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted(family, rslora=True)
    identity = AdapterIdentity(form=form_of(*model_targets(model), rslora=True), base="d")
    write_adapter(identity, model.weights(), str(tmp_path), tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(random_model(family), tmp_path / "a").eval()
    with torch.no_grad():
        wanted = [theirs(row.unsqueeze(0)).logits[0] for row in ROWS]
    for found, other in zip(split(logits_of(model), ROWS), wanted, strict=True):
        assert torch.allclose(found, other, atol=5e-5)


def model_targets(model):
    names = [name.split(".") for name in model.weights()]
    return sorted({".".join(parts[-3:-1] if parts[-3] == "experts" else parts[-2:-1]) for parts in names})


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_reads_back_to_the_bit(family, tmp_path):
    model = adapted(family)
    identity = AdapterIdentity(form=form_of(*model_targets(model)), base="d")
    write_adapter(identity, model.weights(), "somewhere", tmp_path)
    config, found = read_config(tmp_path)
    assert found == identity
    assert why_other_form(config, identity.form) is None
    assert why_other_form(config, form_of(rank=4)) is not None
    assert why_other_form(config, form_of(alpha=8.0)) is not None
    assert why_other_form(PeftConfig(r=3, lora_alpha=7.0, use_dora=True), identity.form) is not None
    back = read_tensors(tmp_path, model.weights())
    assert list(back) == list(model.weights())
    assert all(torch.equal(back[name], tensor) for name, tensor in model.weights().items())
    with pytest.raises(ConfigError, match="does not fit"):
        read_tensors(tmp_path, adapted(family, "o_proj").weights())
    with pytest.raises(ConfigError, match="fits the model"):
        read_tensors(tmp_path, adapted(family, rank=4).weights())


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no folder of a LoRA adapter"):
        read_config(tmp_path)


def test_identities_are_told_apart():
    one = AdapterIdentity(form=form_of("q_proj"), base="a")
    assert why_another(one, one) is None
    assert "another base" in (why_another(one, AdapterIdentity(form=one.form, base="b")) or "")
    assert "alpha 9.0 instead of 7.0" in (
        why_another(one, AdapterIdentity(form=form_of("q_proj", alpha=9.0), base="a")) or ""
    )
    assert "whole model" in (why_another(one, None) or "")
    assert "an adapter" in (why_another(None, one) or "")
    assert one.label != AdapterIdentity(form=one.form, base="b").label
