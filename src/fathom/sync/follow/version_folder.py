"""One version as a Hugging Face folder that is whole and proven, or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError, DeliveryError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.model.lora.peft_folder import read_tensors, write_adapter
from fathom.model.model_folder import read_model, served_dtype, write_model
from fathom.sync.digest import digest, shaped
from fathom.sync.follow.model_files import CONFIG_FILE

VERSION_FILE = "fathom_version.json"
"""In each folder: which version it holds."""
UNFINISHED = ".unfinished-"
"""How a folder's name begins until it is whole."""


def blank(manifest: Manifest) -> dict[str, Tensor]:
    """Tensors for a version to be written into, on the CPU.

    Raises:
        ConfigError: it is published in a format that a Hugging Face folder does not have.
    """
    coded = sorted({entry.format.name for entry in manifest.tensors if entry.format is not None})
    if coded:
        raise ConfigError(
            f"{manifest.version.name} is published as {', '.join(coded)}, and no Hugging Face folder is made of that; "
            "let an engine that serves this format follow the chain"
        )
    return {entry.name: shaped(torch.empty(entry.size_bytes, dtype=torch.uint8), entry) for entry in manifest.tensors}


def write_version(
    files: Mapping[str, bytes],
    version: PolicyVersion,
    weights: Mapping[str, Tensor],
    folder: Path,
    adapter: AdapterIdentity | None = None,
    base: str = "",
) -> None:
    """Write a version as a folder that `transformers`, this project and most engines load; of an adapter, as one that
    `peft` loads.

    It is written beside its place, read back by the code that trains and serves, compared with the version's digest,
    flushed to the medium and only then given its name.

    Args:
        files: the model's, see `model_files`.
        version: what the weights are.
        weights: on the CPU, as they were published.
        folder: must not exist.
        adapter: whose tensors they are. None: a whole model's.
        base: what the base of an adapter is called. Empty: its folder does not say, but for the digest.

    Raises:
        ConfigError: `folder` exists, or `files` describe no model.
        PayloadError: the weights are of another model, or what was written is not the version.
        DeliveryError: the medium failed.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists and is not overwritten; name another folder")
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        if adapter is None:
            write_model(files[CONFIG_FILE], weights, unfinished)
        else:
            write_adapter(adapter, weights, base, unfinished)
        for name, content in files.items():
            if name != CONFIG_FILE:
                (unfinished / name).write_bytes(content)
        (unfinished / VERSION_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(version)))
        back = read_model(unfinished, served_dtype(weights)) if adapter is None else read_tensors(unfinished, weights)
        found = digest(back)
        if found != version.digest:
            raise PayloadError(f"{version.name} read back from its folder has the digest {found}, not {version.digest}")
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        unfinished.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        raise DeliveryError(f"cannot write {version.name} to {folder} ({error}); make room or name another") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def version_in(folder: Path) -> PolicyVersion | None:
    """The version that a folder holds. None: it was not made by `write_version`."""
    try:
        return msgspec.json.decode((folder / VERSION_FILE).read_bytes(), type=PolicyVersion)
    except (OSError, msgspec.MsgspecError):
        return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
