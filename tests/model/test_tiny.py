from __future__ import annotations

import pytest
import torch
from random_models import packed

from fathom.core.errors import ConfigError
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.text.tokenizer import Tokenizer

torch.set_num_threads(1)


def weights_of(folder):
    return LanguageModel.load(folder, torch.float32, "cpu").weights()


def test_the_seed_alone_makes_the_weights(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    make_tiny("arithmetic", 1, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    make_tiny("arithmetic", 1, tmp_path / "b")
    make_tiny("arithmetic", 2, tmp_path / "c")
    first, second, third = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], third["model.embed_tokens.weight"])


def test_it_is_small_reads_characters_and_runs(tmp_path):
    make_tiny("arithmetic", 0, tmp_path)
    model, tokenizer = LanguageModel.load(tmp_path, torch.float32, "cpu"), Tokenizer.load(tmp_path)
    assert 0.4e6 < sum(tensor.numel() for tensor in model.weights().values()) < 1e6
    assert model.shape.vocab_size < 64
    assert model.shape.max_positions == 256
    text = "12+7=(a.b) - 3*4/5\n?"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    logits = model.logits(model.hidden(*packed([torch.tensor(ids)])))
    assert logits.shape == (len(ids), model.shape.vocab_size)
    assert bool(logits.isfinite().all())
    with pytest.raises(ConfigError, match="cannot encode"):
        tokenizer.encode("1€")


def test_its_prompt_begins_once_and_its_answers_end(tmp_path):
    make_tiny("arithmetic", 0, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    bos, end = tokenizer.special.bos_id, tokenizer.special.eos_id
    assert bos is not None
    assert (tokenizer.decode_token(bos), tokenizer.special.stop_ids) == ("<bos>", (end,))
    assert bos not in tokenizer.encode("12+7=")


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose one of arithmetic"):
        make_tiny("poetry", 0, tmp_path)
