"""The weights that a run starts from, and the devices they go to. Importing this loads torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from fathom.core.errors import ConfigError
from fathom.model.tiny import make_tiny
from fathom.run.history.folder import RunFolder
from fathom.run.starting_model import StartingModel
from fathom.text.tiny_tokenizers import TINY_TOKENIZERS


def starting_weights(model: StartingModel, tiny: str | None, seed: int, folder: RunFolder) -> Path:
    """The Hugging Face folder to start from; the tiny model called `tiny` is made from the seed, once.

    The tokenizer is kept with the run in any case.
    """
    source = model.folder or _made_tiny(tiny or "", seed, folder)
    folder.keep_tokenizer(source)
    return source


def require_devices(devices: Mapping[str, str]) -> None:
    """Raise ConfigError when a device is not here. `devices`: by the option that names it."""
    for option, device in devices.items():
        index = int(device.partition(":")[2] or 0)
        if device != "cpu" and index >= torch.cuda.device_count():
            raise ConfigError(
                f"{option} = {device!r}, but this machine has {torch.cuda.device_count()} CUDA devices that torch can "
                "use; set 'cpu', or install a torch build for the GPU"
            )


def _made_tiny(tiny: str, seed: int, folder: RunFolder) -> Path:
    if not folder.model.is_dir():
        unfinished = folder.model.with_name(".unfinished-model")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        TINY_TOKENIZERS[tiny](unfinished)
        make_tiny(tiny, seed, unfinished)
        unfinished.rename(folder.model)
    return folder.model
