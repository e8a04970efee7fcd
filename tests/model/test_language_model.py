from __future__ import annotations

import json

import pytest
import torch
from random_models import CONFIGS, packed, random_config, random_ids, random_model
from transformers import GemmaConfig, LlamaConfig

from fathom.core.errors import ConfigError, PayloadError
from fathom.model.families import ModelFamily, refuse_unsupported
from fathom.model.language_model import LanguageModel
from fathom.model.resolve import resolve_model

torch.set_num_threads(1)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


def logits(model):
    with torch.no_grad():
        return model.logits(model.hidden(*packed(random_ids(7))))


def copies(weights):
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_saved_model_loads_as_it_was(tmp_path, family, tied):
    model = LanguageModel(random_model(family, tie_word_embeddings=tied))
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path, torch.float32, "cpu")
    assert torch.equal(logits(again), logits(model))
    assert again.shape == model.shape


def test_weights_are_named_once_and_in_order(tied):
    model = LanguageModel(random_model(tie_word_embeddings=tied))
    names = list(model.weights())
    assert names == sorted(names)
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not tied


def test_using_weights_swaps_pointers_and_tied_names_follow(tied):
    model = LanguageModel(random_model(seed=0, tie_word_embeddings=tied))
    other = LanguageModel(random_model(seed=1, tie_word_embeddings=tied))
    given = copies(other.weights())
    model.use(given)
    assert torch.equal(logits(model), logits(other))
    assert all(model.weights()[name].data_ptr() == given[name].data_ptr() for name in given)
    given["model.norm.weight"].mul_(2)
    assert not torch.equal(logits(model), logits(other))


def _without(weights):
    del weights["model.norm.weight"]


def _renamed(weights):
    weights["model.extra.weight"] = torch.zeros(1)


def _misshapen(weights):
    weights["model.norm.weight"] = torch.zeros(33)


def _mistyped(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, "model.norm.weight is missing"),
        (_renamed, "model.extra.weight is unknown"),
        (_misshapen, r"model.norm.weight is torch.float32 \[33\]"),
        (_mistyped, "model.norm.weight is torch.bfloat16"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(spoil, message):
    model = LanguageModel(random_model(seed=0))
    before = logits(model)
    weights = copies(LanguageModel(random_model(seed=1)).weights())
    spoil(weights)
    with pytest.raises(PayloadError, match=message):
        model.use(weights)
    assert torch.equal(logits(model), before)


def test_tensors_that_overlap_cannot_be_named():
    plain = random_model()
    joint = torch.zeros(64)
    plain.model.norm.weight.data = joint[:32]
    plain.model.layers[0].input_layernorm.weight.data = joint[32:]
    with pytest.raises(PayloadError, match="share memory"):
        LanguageModel(plain).weights()


def test_the_head_computes_in_the_models_dtype_and_logits_are_float32(tmp_path):
    LanguageModel(random_model()).save(tmp_path)
    model = LanguageModel.load(tmp_path, torch.bfloat16, "cpu")
    hidden = model.hidden(*packed(random_ids(4)))
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


def test_dropout_is_off():
    model = LanguageModel(random_model(attention_dropout=0.5).train())
    assert torch.equal(logits(model), logits(model))


def test_the_families_are_those_tested_here():
    assert set(ModelFamily) == set(CONFIGS)
    assert all(refuse_unsupported(random_config(family)) == family for family in CONFIGS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GemmaConfig(), "'gemma' are not supported; choose one of llama, qwen2, qwen3"),
        (LlamaConfig(num_experts=8), "sets num_experts"),
        (random_config("mixtral", sliding_window=8), "sets sliding_window"),
        (random_config(sliding_window=8), "sets sliding_window"),
        (random_config(final_logit_softcapping=30.0), "sets final_logit_softcapping"),
        (random_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding_window"),
        (random_config("qwen3", layer_types=["full_attention", "sliding_attention"]), "layers of type sliding_att"),
        (random_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
    ],
)
def test_what_the_forward_would_ignore_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(config)


def test_a_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match="no model folder"):
        LanguageModel.load(tmp_path / "none", torch.float32, "cpu")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LanguageModel.load(tmp_path, torch.float32, "cpu")
    random_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no weights"):
        LanguageModel.load(tmp_path, torch.float32, "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LanguageModel.load(tmp_path, torch.float32, "cpu")


def test_a_folder_with_other_weights_than_its_config_is_refused(tmp_path):
    LanguageModel(random_model()).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"missing keys.*layers\.2"):
        LanguageModel.load(tmp_path, torch.float32, "cpu")


def test_a_model_is_found_by_its_folder(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no model folder"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
