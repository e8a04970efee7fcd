"""Where a model lies: a folder here, or a copy of one from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from fathom.core.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PARTS = ("*.json", "*.jinja", "*.safetensors")


def resolve_model(source: str) -> Path:
    """The local folder of a model. A hub id is fetched (weights as safetensors alone) unless it is here already.

    Raises:
        ConfigError: `source` is neither a folder nor a hub id that can be had.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{source} is a file; give the Hugging Face model folder it lies in")
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(f"no model folder {source}; `fathom models fetch` makes one")
    try:
        return Path(snapshot_download(source, allow_patterns=list(_PARTS)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"no model folder {source}, and no model of that name could be had from the hub "
            f"({type(error).__name__}); `fathom models fetch` makes a folder without a hub"
        ) from error
