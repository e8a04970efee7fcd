"""What a Hugging Face folder holds besides weights: it lies beside a chain, so that the store alone is enough."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fathom.core.errors import ConfigError
from fathom.sync.chain.store import Store
from fathom.text.tokenizer import TOKENIZER_FILES

CONFIG_FILE = "config.json"
"""Describes the model."""
MODEL_FILES = (CONFIG_FILE, *TOKENIZER_FILES)
"""What is kept of a model's folder, where it is there."""


def keep_model_files(store: Store, model_folder: Path) -> None:
    """Put the files of the folder that a run starts from into its chain's store, where they are not there already.

    Raises:
        DeliveryError | PayloadError: the store cannot be written or read.
    """
    there = store.list("model")
    for name in MODEL_FILES:
        path = model_folder / name
        if path.is_file() and _object(name) not in there:
            store.put(_object(name), [path.read_bytes()])


def model_files(store: Store) -> Mapping[str, bytes]:
    """The files, by name.

    Raises:
        ConfigError: nothing describes the model of this chain.
        PayloadError: the store cannot be read.
    """
    there = store.list("model")
    if _object(CONFIG_FILE) not in there:
        raise ConfigError(f"{store.url} has no {_object(CONFIG_FILE)}: it says of no model what its tensors are")
    return {name: store.get(_object(name)) for name in MODEL_FILES if _object(name) in there}


def _object(name: str) -> str:
    return f"model/{name}"
