from __future__ import annotations

import pytest
import torch
from random_models import packed

from fathom.core.errors import ConfigError
from fathom.model.language_model import LanguageModel
from fathom.model.routing import ExpertShape
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer
from fathom.text.tokenizer import Tokenizer

torch.set_num_threads(1)


def make(seed, folder, name="arithmetic"):
    folder.mkdir(exist_ok=True)
    vocabulary = save_character_tokenizer(folder)
    make_tiny(name, seed, folder)
    return vocabulary


def weights_of(folder):
    return LanguageModel.load(folder, torch.float32, "cpu").weights()


def test_the_seed_alone_makes_the_weights(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    make(1, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    make(1, tmp_path / "b")
    make(2, tmp_path / "c")
    first, second, third = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], third["model.embed_tokens.weight"])


def test_it_is_small_reads_characters_and_runs(tmp_path):
    vocabulary = make(0, tmp_path)
    model, tokenizer = LanguageModel.load(tmp_path, torch.float32, "cpu"), Tokenizer.load(tmp_path)
    assert 0.4e6 < sum(tensor.numel() for tensor in model.weights().values()) < 1e6
    assert (model.shape.vocab_size, model.shape.max_positions) == (vocabulary.size, vocabulary.max_positions)
    text = "12+7=(a.b) - 3*4/5\n?"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    logits = model.logits(model.hidden(*packed([torch.tensor(ids)])))
    assert logits.shape == (len(ids), model.shape.vocab_size)
    assert bool(logits.isfinite().all())


def test_one_has_experts(tmp_path):
    make(0, tmp_path, "moe")
    model = LanguageModel.load(tmp_path, torch.bfloat16, "cpu")
    assert model.shape.experts == ExpertShape(layers=8, experts=64, per_token=8)
    assert 3e6 < sum(tensor.numel() for tensor in model.weights().values()) < 4e6
    routing = model.routing(5)
    ids, positions, plan = packed([torch.arange(5)])
    assert bool(model.logits(model.hidden(ids, positions, plan, routing)).isfinite().all())
    assert not model.shape.experts.fault(routing.chosen, 5)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose one of arithmetic"):
        make_tiny("poetry", 0, tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        make_tiny("arithmetic", 0, tmp_path)
