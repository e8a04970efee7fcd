"""A model folder made from published weights is the model they were published from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import CONFIGS, random_model
from transformers import AutoModelForCausalLM

from fathom.core.errors import ConfigError, PayloadError
from fathom.model.language_model import LanguageModel
from fathom.model.model_folder import read_model, write_model

torch.set_num_threads(1)


def published(model: LanguageModel, folder: Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Its config as a file, and weights as they are published."""
    model.save(folder)
    weights = {name: tensor.detach().clone() for name, tensor in model.weights().items()}
    return (folder / "config.json").read_bytes(), weights


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_is_written_is_read_back_to_the_bit(tmp_path: Path, family, tied: bool) -> None:
    start, made = tmp_path / "start", tmp_path / "made"
    made.mkdir()
    config, weights = published(LanguageModel(random_model(family, tie_word_embeddings=tied)), start)
    for tensor in weights.values():
        tensor.add_(0.125)
    write_model(config, weights, made)
    again = read_model(made, torch.float32)
    assert list(again) == list(weights)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_its_element_type_is_that_of_the_weights_and_others_load_it(tmp_path: Path) -> None:
    start, made = tmp_path / "start", tmp_path / "made"
    made.mkdir()
    config, weights = published(LanguageModel(random_model(tie_word_embeddings=True)), start)
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    write_model(config, narrow, made)
    loaded = AutoModelForCausalLM.from_pretrained(made)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, narrow["model.embed_tokens.weight"])


def _without(weights):
    del weights["model.norm.weight"]


def _with_a_stranger(weights):
    weights["model.stranger"] = torch.zeros(1)


def _transposed(weights):
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].T.contiguous()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(_without, r"model.norm\.weight"), (_with_a_stranger, r"model\.stranger"), (_transposed, "up_proj")],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path: Path, spoil, named: str) -> None:
    config, weights = published(LanguageModel(random_model(tie_word_embeddings=True)), tmp_path)
    spoil(weights)
    with pytest.raises(PayloadError, match=named):
        write_model(config, weights, tmp_path)


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json of a causal"):
        write_model(b"{}", {"a": torch.zeros(1)}, tmp_path)
