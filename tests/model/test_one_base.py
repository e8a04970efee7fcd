"""Several models over one base in memory: each with its adapter is what it would be alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fathom.config.lora import LoraConfig
from fathom.core.adapter import AdapterForm
from fathom.model.attention import PackedAttention
from fathom.model.language_model import LanguageModel
from fathom.model.tiny import make_tiny
from fathom.text.characters import save_character_tokenizer

torch.set_num_threads(1)
FORMS = (
    LoraConfig(rank=4, alpha=8.0).form("a"),
    LoraConfig(rank=2, alpha=6.0, rslora=True, target_modules=("q_proj", "v_proj")).form("b"),
)
TOKENS = torch.arange(3, 30) % 17


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS, torch.arange(len(TOKENS)), PackedAttention([len(TOKENS)])))


def shaken(model: LanguageModel, form: AdapterForm, seed: int) -> LanguageModel:
    """With an adapter that changes something."""
    model.adapt(form, seed)
    generator = torch.Generator().manual_seed(seed)
    model.use({name: torch.randn(each.shape, generator=generator) / 8 for name, each in model.weights().items()})
    return model


@pytest.mark.parametrize("tiny", ["arithmetic", "moe"])
def test_each_is_what_it_would_be_alone(tmp_path: Path, tiny: str) -> None:
    save_character_tokenizer(tmp_path)
    make_tiny(tiny, 0, tmp_path)
    load = (tmp_path, torch.float32, "cpu")
    alone = [logits(shaken(LanguageModel.load(*load), form, seed)) for seed, form in enumerate(FORMS)]
    bare, *models = LanguageModel.load_over_one_base(*load, 1 + len(FORMS))
    base = logits(bare)
    for seed, (model, form) in enumerate(zip(models, FORMS, strict=True)):
        shaken(model, form, seed)
    for found, wanted in zip(map(logits, models), alone, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(found, base)
    assert torch.equal(logits(bare), base)
    places = [{name: each.data_ptr() for name, each in model.base_weights().items()} for model in (bare, *models)]
    assert all(each == places[0] for each in places)
    before = logits(models[1])
    shaken_again = {name: each + 1 for name, each in models[0].weights().items()}
    models[0].use(shaken_again)
    assert torch.equal(logits(models[1]), before)
