"""The model that a run starts from, as far as it is known without loading weights."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fathom.config.run import ModelConfig
from fathom.core.errors import ConfigError
from fathom.text.tiny_tokenizers import TINY_TOKENIZERS
from fathom.text.tokenizer import Tokenizer

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Entries of a config.json that give a model experts."""
_TINY_BYTES = 16_000_000
"""More than the weights of a tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingModel:
    """Facts about a model folder, or about the tiny model that the run will make."""

    folder: Path | None
    """Hugging Face folder. None: a tiny model is made in the run's folder."""
    tokenizer: Tokenizer
    """Its tokenizer."""
    vocab_size: int
    """Rows of its output head."""
    max_positions: int
    """Longest sequence it was made for."""
    size_bytes: int
    """Bytes of its weights on disk."""
    has_experts: bool
    """It routes tokens to experts."""

    @classmethod
    def of(cls, model: ModelConfig) -> StartingModel:
        """Look at the model that the options name; a hub id is fetched. Raises ConfigError when it is not usable."""
        return _tiny(model.tiny or "") if model.path is None else _in_folder(_folder(model.path), model.path)


def _tiny(name: str) -> StartingModel:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = TINY_TOKENIZERS[name](Path(folder))
        return StartingModel(
            folder=None,
            tokenizer=Tokenizer.load(Path(folder)),
            vocab_size=vocabulary.size,
            max_positions=vocabulary.max_positions,
            size_bytes=_TINY_BYTES,
            has_experts=name == "moe",
        )


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from fathom.model.resolve import resolve_model  # the hub's client: only where a hub id may be meant

    return resolve_model(path)


def _in_folder(folder: Path, path: str) -> StartingModel:
    tokenizer = Tokenizer.load(folder)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab_size, max_positions = int(facts["vocab_size"]), int(facts["max_position_embeddings"])
    except FileNotFoundError:
        raise ConfigError(f"model.path = {path!r} has no config.json; give a Hugging Face model folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.path = {path!r}: its config.json does not say vocab_size and max_position_embeddings ({error!r}); "
            "give the folder of a causal language model"
        ) from None
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model.path = {path!r} has no weights (*.safetensors); is its download complete?")
    return StartingModel(
        folder=folder,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        size_bytes=sum(file.stat().st_size for file in weights),
        has_experts=any(facts.get(entry) for entry in _EXPERT_COUNTS),
    )
